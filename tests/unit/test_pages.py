"""How pages are read and compared, before they are followed on a server."""

from __future__ import annotations

import pytest

from support.pages import Block, Reader, matches, read_blocks

PAGE = """
```sh
echo one
```

```text
one
```

```python
# folder/two.py
print("two")
```

```sh
python folder/two.py
```

```text
{shown}
```
"""


def test_output_belongs_to_the_commands_before_it():
    assert read_blocks(PAGE)[0] == Block("sh", "echo one\n", "one\n")


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\nb", "a  \nb\n", True),
        ("a", "b", False),
        ("a … c", "a b c", True),
        ("a … c", "a b d", False),
        ("{\n…x…\n}", '{\n  "y": 1,\n  "x": 2\n}', True),
        ("1.5", "1x5", False),
    ],
)
def test_dots_stand_for_anything(shown, printed, same):
    assert matches(shown, printed) == same


def test_page_is_followed_in_its_folder(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(shown="two"))
    with Reader(tmp_path) as reader:
        reader.follow(page)
    assert (reader.commands, reader.comparisons) == (2, 2)


def test_page_that_shows_another_output_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(shown="three"))
    with Reader(tmp_path) as reader, pytest.raises(AssertionError, match="three"):
        reader.follow(page)
