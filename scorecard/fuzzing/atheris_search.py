"""Fuzzing of one target guided by coverage: python -m scorecard.fuzzing.atheris_search TARGET [LIBFUZZER OPTIONS]."""

from __future__ import annotations

import sys

from scorecard import CORPUS, ROOT
from scorecard.fuzzing import corpus


def main() -> None:
    try:
        import atheris
    except ImportError:
        raise SystemExit("atheris is not installed; pip install atheris (Linux, CPython 3.11 to 3.13)") from None
    name, *options = sys.argv[1:]
    with atheris.instrument_imports(include=["flambeau"]):
        from scorecard.fuzzing.targets import TARGETS
    target = next((one for one in TARGETS if one.name == name), None)
    if target is None:
        raise SystemExit(f"{name!r} is not a target; they are {', '.join(one.name for one in TARGETS)}")

    def check(data: bytes) -> None:
        try:
            target.check(data)
        except Exception:
            corpus.save(name, data)
            raise

    # It writes what reaches new code into the first folder; only inputs that break something join the corpus.
    reached = ROOT / "build" / "fuzzing" / name
    reached.mkdir(parents=True, exist_ok=True)
    limits = ["-timeout=10", "-max_len=4096", f"-artifact_prefix={reached}/"]
    atheris.Setup([sys.argv[0], *limits, *options, str(reached), str(CORPUS / name)], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
