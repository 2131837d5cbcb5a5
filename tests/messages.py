"""Every message a user can meet, found in the source: problems with their hints, warnings, errors of the log.

A message is told as it is written there, with `{...}` where a value stands. What a function is given as an
argument is looked for one step up, at its callers in the same module. Nothing is imported or run.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LOG_KINDS = {"warning": "warning", "error": "error", "exception": "error", "critical": "error"}
# Only handed on: what it says is told where it is made.
HANDED_ON = re.compile(r"\{[^{}]*\}|%s")
SECONDS = re.compile(r"\d s\b")
VALUE = re.compile(r"\{[^{}]*\}|%[-.\d]*[sdfgr]")

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """`kind`: problem, warning or error. Only a problem has a hint."""

    module: str
    kind: str
    text: str
    hint: str = ""

    @property
    def has_values(self) -> bool:
        return VALUE.search(self.text) is not None or SECONDS.search(self.text) is not None

    @property
    def words(self) -> str:
        """What is left without the values."""
        return VALUE.sub("", self.text)


def messages_of(package: Path) -> list[Message]:
    found = {each for path in sorted(package.rglob("*.py")) for each in _messages_in(path, package)}
    return sorted(found)


def listing(messages: list[Message]) -> str:
    lines: list[str] = []
    module = ""
    for message in messages:
        if message.module != module:
            module = message.module
            lines += ["", module]
        lines.append(f"  {message.kind}: {message.text}")
        if message.kind == "problem":
            lines.append(f"     hint: {message.hint}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _messages_in(path: Path, package: Path) -> Iterator[Message]:
    module = _Module(ast.parse(path.read_text()))
    where = path.relative_to(package).as_posix()
    for call, scopes in module.calls:
        name = _name_of(call.func)
        if name == "Problem" and call.args:
            texts = module.texts(call.args[0], scopes)
            hints = module.texts(call.args[1], scopes)
            # Where both have several forms they are made together, in the order in which they are written.
            if len(texts) == len(hints) > 1:
                yield from (Message(where, "problem", *pair) for pair in zip(texts, hints, strict=True))
            else:
                yield from (Message(where, "problem", text, hint) for text in texts for hint in hints)
        elif name in LOG_KINDS and _is_log(call.func):
            form, *values = call.args
            texts = module.texts(form, scopes)
            if texts == ["%s"]:
                texts = module.texts(values[0], scopes)
            yield from (Message(where, LOG_KINDS[name], text) for text in texts)
        elif (
            name == "warn" and isinstance(call.func, ast.Attribute) and _name_of(call.func.value) == "warnings"
        ):
            yield from (Message(where, "warning", text) for text in module.texts(call.args[0], scopes))


class _Module:
    def __init__(self, tree: ast.Module) -> None:
        self.calls: list[tuple[ast.Call, tuple[ast.AST, ...]]] = []
        self._constants: dict[str, ast.expr] = {}
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self._constants[statement.targets[0].id] = statement.value
        self._visit(tree, ())

    def _visit(self, node: ast.AST, scopes: tuple[ast.AST, ...]) -> None:
        if isinstance(node, ast.Call):
            self.calls.append((node, scopes))
        inner = (*scopes, node) if isinstance(node, Function) else scopes
        for child in ast.iter_child_nodes(node):
            self._visit(child, inner)

    def texts(self, node: ast.expr, scopes: tuple[ast.AST, ...], *, depth: int = 0) -> list[str]:
        """All forms that an expression can have, as templates."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr():
                return ["".join(map(self._part, node.values))]
            case ast.IfExp():
                return [*self.texts(node.body, scopes), *self.texts(node.orelse, scopes)]
            case ast.Name(id=name):
                return self._named(name, scopes, depth) or [f"{{{name}}}"]
            case _:
                return [f"{{{ast.unparse(node)}}}"]

    def _part(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.FormattedValue(value=ast.Name(id=name)) if isinstance(
                self._constants.get(name), ast.Constant
            ):
                return str(getattr(self._constants[name], "value", ""))
            case ast.FormattedValue():
                return "{" + ast.unparse(node.value).replace("{", "(").replace("}", ")") + "}"
            case _:
                return "{...}"

    def _named(self, name: str, scopes: tuple[ast.AST, ...], depth: int) -> list[str]:
        """What a name stands for: assigned in the function, its argument, or a constant of the module."""
        for scope in reversed(scopes):
            assigned = [
                statement.value
                for statement in ast.walk(scope)
                if isinstance(statement, ast.Assign | ast.AnnAssign)
                and statement.value is not None
                and name in _targets(statement)
            ]
            if assigned:
                found = [text for value in assigned for text in self.texts(value, scopes, depth=depth)]
                return [text for text in found if text]
            arguments = [*scope.args.posonlyargs, *scope.args.args] if isinstance(scope, Function) else []
            names = [argument.arg for argument in arguments]
            if name in names and isinstance(scope, ast.FunctionDef) and depth == 0:
                return self._given(scope.name, [each for each in names if each != "self"].index(name), name)
        constant = self._constants.get(name)
        return self.texts(constant, ()) if isinstance(constant, ast.Constant | ast.JoinedStr) else []

    def _given(self, function: str, index: int, name: str) -> list[str]:
        found: list[str] = []
        for call, scopes in self.calls:
            if _name_of(call.func) == function:
                values = [each.value for each in call.keywords if each.arg == name] or call.args[
                    index : index + 1
                ]
                found += [text for value in values for text in self.texts(value, scopes, depth=1)]
        return [text for text in found if not HANDED_ON.fullmatch(text)]


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_log(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and _name_of(node.value).endswith("log")
