"""Sandbox: Jinja as Hugging Face configures it for chat templates; loops, calls and texts are counted.

A template comes with a model's files. It has access to the messages and to what is listed here only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer


class GenerationBlock(Extension):
    """`{% generation %}` marks the model's output for training; here its content is rendered as usual."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PublicNamespace(Namespace):
    """A namespace without private names."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no {name!r}")
        super().__setitem__(name, value)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one model's templates."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols], finalize=budget.write
        )
        self._budget = budget
        self.filters.update(tojson=to_json, counted=counted(budget), joined=joined(budget))
        self.globals.update(
            raise_exception=raise_exception, strftime_now=strftime_now, namespace=PublicNamespace, dict=make_dictionary
        )

    def compile_counted(self, source: str) -> tuple[Template, bool]:
        """A template, and whether it iterates over the parts of a message's content."""
        tree = self.parse(source)
        takes_parts = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
        return self.from_string(BudgetTransformer().visit(tree)), takes_parts

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self._budget.step()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._budget.check_size(operator, left, right)
        return super().call_binop(context, operator, left, right)


class BudgetTransformer(NodeTransformer):
    """Passes the items of loops and the operands of `~` through the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        texts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(texts, "joined", [], [], None, None, lineno=node.lineno)


def is_content(expression: nodes.Node) -> bool:
    """Whether an expression is the content of a message."""
    if isinstance(expression, nodes.Getattr):
        return expression.attr == "content"
    if isinstance(expression, nodes.Getitem) and isinstance(expression.arg, nodes.Const):
        return bool(expression.arg.value == "content")
    return False


def counted(budget: Budget) -> Callable[..., Iterator[Any]]:
    """A filter that counts the iterations of a loop."""

    @pass_context  # otherwise Jinja would evaluate it while compiling
    def count(context: Context, items: Iterable[Any]) -> Iterator[Any]:
        return budget.rounds(items)

    return count


def joined(budget: Budget) -> Callable[..., str]:
    """A filter that does what `~` does."""

    @pass_context
    def join(context: Context, items: Iterable[Any]) -> str:
        return "".join(budget.write(str(item)) for item in items)

    return join


def raise_exception(message: str) -> None:
    """Available in templates."""
    raise TemplateRejection(message)


def strftime_now(pattern: str) -> str:
    """The local time, for templates that include the date."""
    return datetime.now().strftime(pattern)


def make_dictionary(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict` in templates, without access to the class."""
    return dict(*args, **kwargs)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; Jinja's own filter escapes `<`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


MAX_CHARACTERS = 32 * 1024 * 1024  # written to variables and to the output
MAX_STEPS = 200_000  # loop iterations and calls: a second or two
MAX_SECONDS = 10.0


class TemplateRejection(Exception):
    """The template called `raise_exception`: it does not accept the messages."""


class BudgetExceeded(Exception):
    """The template exceeded a limit."""


class Budget:
    """What is left of the limits."""

    def __init__(self) -> None:
        self.steps = self.characters = 0
        self.deadline = 0.0

    def reset(self) -> None:
        self.steps, self.characters = MAX_STEPS, MAX_CHARACTERS
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Count one loop iteration or call."""
        self.steps -= 1
        if self.steps < 0:
            raise BudgetExceeded(f"it takes more than {MAX_STEPS} steps")
        if time.monotonic() > self.deadline:
            raise BudgetExceeded(f"it takes more than {MAX_SECONDS:g} seconds")

    def write(self, value: Any) -> Any:
        """Count the characters of a value that is written; returns the value."""
        if isinstance(value, str):
            self.characters -= len(value)
            if self.characters < 0:
                raise BudgetExceeded(f"it writes more than {MAX_CHARACTERS} characters")
        return value

    def rounds(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop; each is counted."""
        for item in items:
            self.step()
            yield item

    def check_size(self, operator: str, left: Any, right: Any) -> None:
        """Raise before a text, list or number becomes too large."""
        size = 0
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            size = len(left) + len(right)
        elif operator == "*":
            size = length(left) * length(right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * abs(right)
        if size > MAX_CHARACTERS:
            raise BudgetExceeded(f"it builds a value of {size} characters")


def length(value: Any) -> int:
    """The items of a text or list; for a number, how often it repeats the other operand."""
    return len(value) if hasattr(value, "__len__") else abs(int(value)) if isinstance(value, int) else 1
