"""Sandbox: Jinja as Hugging Face configures it for chat templates; loops, calls and texts are counted.

A template comes with a model's files. It has access to the messages and to what is listed here only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from flambeau.llm.text.chat_budget import Budget, TemplateRejection, braces_size, operator_size, result_size

# Of Jinja's tests.
PART_FILTERS = ("list", "reject", "rejectattr", "select", "selectattr")
COMPARISONS = (
    *("in", "==", "eq", "equalto", "!=", "ne"),
    *(">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le"),
)


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

    def __repr__(self) -> str:
        return "<Namespace>"  # without its content, which may hold other namespaces


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one model's templates."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols], finalize=budget.write
        )
        self._budget = budget
        self.filters["tojson"] = to_json
        self.filters = {name: guarded(name, one, budget) for name, one in self.filters.items()}
        self.filters.update(
            counted=counted(budget), joined=joined(budget), built=passed(budget.build), compared=passed(budget.compare)
        )
        tests: Any = self.tests
        self.tests = {name: compared(one, budget) if name in COMPARISONS else one for name, one in tests.items()}
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=raise_exception, strftime_now=strftime_now, namespace=PublicNamespace, dict=make_dictionary
        )

    def compile_counted(self, source: str) -> tuple[Template, bool]:
        """A template, and whether it iterates over the parts of a message's content."""
        tree = self.parse(source)
        takes_parts = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
        return self.from_string(BudgetTransformer().visit(tree)), takes_parts

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = __self._budget
        budget.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, float, list, tuple, dict)):  # a method
            given = (*args, *kwargs.values())
            if __obj.__name__ == "join" and args:
                args = given = ([*budget.rounds(args[0])],)
            budget.allow(result_size(__obj.__name__, owner, given))
        return budget.build(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator != "+" or type(left) is not str or type(right) is not str:  # most are: a text is counted below
            self._budget.allow(operator_size(operator, left, right))
        return self._budget.build(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` of the sandbox, with a limit."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        @wraps(formatted)
        def limited(*args: Any, **kwargs: Any) -> str:
            given = (*args, *kwargs.values())
            if value.__name__ == "format_map" and args and isinstance(args[0], dict):
                given = (*args[0].values(),)
            self._budget.allow(braces_size(value.__self__, given))
            return formatted(*args, **kwargs)

        return limited


class BudgetTransformer(NodeTransformer):
    """Passes the items of loops, the operands of `~` and of comparisons, and slices through the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        texts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(texts, "joined", [], [], None, None, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        operands: tuple[Any, ...] = (node, *node.ops)
        if len(operands) == 2 and any(isinstance(operand.expr, nodes.Const) for operand in operands):
            return node  # a text or a number: no list is compared with another
        for operand in operands:
            operand.expr = nodes.Filter(operand.expr, "compared", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        return nodes.Filter(node, "built", [], [], None, None, lineno=node.lineno)


def is_content(expression: nodes.Node) -> bool:
    """Whether an expression is the content of a message, or some of its parts."""
    if isinstance(expression, nodes.Filter) and expression.name in PART_FILTERS and expression.node is not None:
        return is_content(expression.node)
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


def guarded(name: str, function: Callable[..., Any], budget: Budget) -> Callable[..., Any]:
    """A filter that checks the size of its result before and counts it after."""
    wanted = getattr(function, "jinja_pass_arg", None)  # what Jinja passes to it first

    @pass_context
    def call(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, Iterator):
            value = budget.rounds(value)
            if name == "join":
                value = [*value]
        budget.allow(result_size(name, value, (*args, *kwargs.values())))
        if wanted is None:
            return budget.build(function(value, *args, **kwargs))
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[wanted.name]
        return budget.build(function(first, value, *args, **kwargs))

    return call


def passed(check: Callable[[Any], Any]) -> Callable[..., Any]:
    """A filter that passes a value on, after a check."""

    @pass_context
    def call(context: Context, value: Any) -> Any:
        return check(value)

    return call


def compared(test: Callable[..., Any], budget: Budget) -> Callable[..., Any]:
    """A test, such as `is eq`, whose operands are checked."""

    @wraps(test)
    def call(*operands: Any, **kwargs: Any) -> Any:
        for operand in (*operands, *kwargs.values()):
            budget.compare(operand)
        return test(*operands, **kwargs)

    return call


def joined(budget: Budget) -> Callable[..., str]:
    """A filter that does what `~` does."""

    @pass_context
    def join(context: Context, items: Iterable[Any]) -> str:
        return "".join(str(budget.write(item)) for item in items)

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
