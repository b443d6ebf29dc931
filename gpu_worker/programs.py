"""The program inside a `.pt2` archive: JSON whose strings torch evaluates, looks up or writes into Python source.

Every string must stand where an export of torch has one and look like what it has there; any other is refused.

expr_str                         sizes, evaluated by sympy      a formula over symbols
guards_code                      executed as Python             comparisons of the inputs' sizes
target, as_operator              looked up attribute by attribute, then called          an operator of a known kind
names of nodes, weights, inputs  written into the source of the module's `forward`      no quotes, no spaces
in_spec, out_spec                how arguments nest; some kinds of nesting import a module      tuples, lists and dicts
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from gpu_worker.errors import ModelError

_LONGEST_FORMULA = 20_000

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|")
_PATH = re.compile(r"[A-Za-z0-9_.@:+/-]*")
_PLAIN = re.compile(r"[A-Za-z0-9_.<>=+ -]*")
_NON_FINITE = re.compile(r"-?Infinity|NaN")
_PAYLOAD = re.compile(r"(weight|tensor)_[0-9]+")
_SYMBOL = re.compile(r"(s|u|zf|zuf|f)[0-9]+")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?")

# `from_file` and `save` touch the disk; names in double underscores are attributes, except Python's own operators.
_OPERATOR = re.compile(
    r"torch\.ops\.aten\.(?!from_file|save)([a-z][A-Za-z0-9_]*|_[a-z][A-Za-z0-9_]*|__i?(and|or|xor|lshift|rshift)__)"
    r"\.[A-Za-z][A-Za-z0-9_]*"
    r"|torch\.ops\.higher_order\.(cond|while_loop|wrap_with_set_grad_enabled|wrap_with_autocast)"
    r"|_operator\.(eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|lshift|rshift|getitem)"
    r"|math\.(trunc|ceil|floor|sqrt)"
    r"|torch\.sym_(not|int|float|ite|max|min|sqrt|sum)|torch\._sym_[a-z0-9]+"
)
_SYMPY_FUNCTION = re.compile(
    r"Symbol|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Abs|floor|ceiling|And|Or|Not|Eq|Ne|Lt|Le|Gt|Ge"
    r"|Equality|Unequality|(Strict)?(Less|Greater)Than|FloorDiv|ModularIndexing|Where|(Python)?Mod|CleanDiv|CeilDiv"
    r"|(Ceil|Floor|Trunc|Round)ToInt|TruncToFloat|RoundDecimal|ToFloat|[LR]Shift|PowByNatural|FloatPow"
    r"|(Float|Int)TrueDiv|IsNonOverlappingAndDenseIndicator|Identity"
)
_GUARD_FUNCTION = re.compile(r"max|min|abs|int|float|round|math\.[a-z]+|torch\._?sym_[a-z0-9]+")
_SIZE = re.compile(r"size|stride|storage_offset")
_NESTED = re.compile(r"builtins\.(tuple|list|dict)|collections\.OrderedDict|torch\.return_types\.[a-z_]+")
_ARITHMETIC = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop)


def require_plain_program(where: str, document: Any) -> None:
    """Raise ModelError, naming the field, when a string of `document` is not what an export has in its place."""
    _walk(where, "", document)


def _walk(where: str, field: str, value: Any) -> None:
    """`field` is the nearest key above `value`: lists pass it on to their elements."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not _PATH.fullmatch(key):
                raise ModelError(f"{where}: a key {_cut(key)} is not a name")
            _walk(where, key, inner)
    elif isinstance(value, list):
        for inner in value:
            _walk(where, field, inner)
    elif isinstance(value, str):
        allowed = _STRINGS.get(field)
        if allowed is None or not allowed(value):
            raise ModelError(f"{where}: {field or 'an entry'} {_cut(value)} is not what an export has there")
    elif field == "use_pickle" and value:
        raise ModelError(f"{where}: an entry needs pickle; export plain tensors instead")


def _is_formula(text: str) -> bool:
    node = _parsed(text)
    return node is not None and _is_term(node)


def _is_term(node: ast.expr) -> bool:
    """What sympy prints for a size: calls of its functions on such terms, numbers and symbols; strings only inside
    `Symbol` and `Float`, because anywhere else sympy would evaluate them in turn.
    """
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or not _SYMPY_FUNCTION.fullmatch(node.func.id):
            return False
        assumptions = all(k.arg and isinstance(k.value, ast.Constant) and _is_number(k.value) for k in node.keywords)
        text = {"Symbol": _SYMBOL, "Float": _NUMBER}.get(node.func.id)
        if text is not None:
            first = node.args[0].value if len(node.args) == 1 and isinstance(node.args[0], ast.Constant) else None
            return assumptions and isinstance(first, str) and bool(text.fullmatch(first))
        return assumptions and all(_is_term(a) for a in node.args)
    if isinstance(node, ast.Name):
        return bool(_SYMBOL.fullmatch(node.id)) or node.id in ("true", "false", "oo", "int_oo", "nan")
    return _is_number(node) or _is_arithmetic(node, _is_term)


def _is_guard(text: str) -> bool:
    node = _parsed(text)
    return node is not None and _is_comparison(node)


def _is_comparison(node: ast.expr) -> bool:
    """What torch prints for a guard: arithmetic over numbers, `L['x'].size()[0]` and a few functions."""
    if isinstance(node, ast.Call):
        if node.keywords:
            return False
        if isinstance(node.func, ast.Attribute) and _SIZE.fullmatch(node.func.attr) and not node.args:
            return _is_input(node.func.value)
        return bool(_GUARD_FUNCTION.fullmatch(ast.unparse(node.func))) and all(_is_comparison(a) for a in node.args)
    if isinstance(node, ast.Subscript):
        whole = isinstance(node.value, ast.Call) and isinstance(node.slice, ast.Constant)
        return _is_input(node) or (whole and _is_comparison(node.value) and _is_number(node.slice))
    return _is_number(node) or _is_arithmetic(node, _is_comparison)


def _is_input(node: ast.expr) -> bool:
    """`L['x']`, and into it: `L['x'][0]['y']`."""
    while isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if type(key) is not int and not (isinstance(key, str) and _IDENTIFIER.fullmatch(key)):
            return False
        node = node.value
        if isinstance(node, ast.Name):
            return node.id == "L"
    return False


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float))


def _is_arithmetic(node: ast.expr, operand: Callable[[ast.expr], bool]) -> bool:
    if not isinstance(node, (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare)):
        return False
    inner = list(ast.iter_child_nodes(node))
    return all(isinstance(n, _ARITHMETIC) or (isinstance(n, ast.expr) and operand(n)) for n in inner)


def _parsed(text: str) -> ast.expr | None:
    """None for what is no expression. Double quotes, backslashes and the like would leave the string that torch puts
    a guard's text in.
    """
    if len(text) > _LONGEST_FORMULA or not re.fullmatch(r"[A-Za-z0-9_\[\]'().,+\-*/%<>=! ]+", text):
        return None
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_nesting(text: str) -> bool:
    try:
        protocol, tree = json.loads(text)
    except (ValueError, TypeError):
        return False
    return type(protocol) is int and _is_tree(tree)


def _is_tree(tree: Any) -> bool:
    if not isinstance(tree, dict) or set(tree) != {"type", "context", "children_spec"}:
        return False
    if not isinstance(tree["children_spec"], list) or not all(_is_tree(t) for t in tree["children_spec"]):
        return False
    kind, context = tree["type"], tree["context"]
    if kind is None:
        return context is None
    if not isinstance(kind, str) or not _NESTED.fullmatch(kind) or not isinstance(context, str):
        return False
    try:
        keys = json.loads(context)
    except ValueError:
        return False
    # Keys of a dict become arguments of `forward`.
    return keys is None or (
        isinstance(keys, list)
        and all(type(k) is int or (isinstance(k, str) and _IDENTIFIER.fullmatch(k)) for k in keys)
    )


def _any(text: str) -> bool:
    """Quoted where it is written into source, or never written there nor evaluated."""
    return True


def _like(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda text: pattern.fullmatch(text) is not None


_STRINGS: dict[str, Callable[[str], bool]] = {
    "expr_str": _is_formula,
    "guards_code": _is_guard,
    "in_spec": _is_nesting,
    "out_spec": _is_nesting,
    "path_name": _like(_PAYLOAD),
    **dict.fromkeys(("target", "as_operator"), _like(_OPERATOR)),
    **dict.fromkeys(("name", "as_name", "user_input_name", "forward_arg_names", "field_names"), _like(_IDENTIFIER)),
    **dict.fromkeys(("parameter_name", "buffer_name", "tensor_constant_name", "fqn"), _like(_PATH)),
    **dict.fromkeys(("type", "verifiers", "torch_version"), _like(_PLAIN)),
    **dict.fromkeys(("as_float", "as_floats", "as_float_lists", "real", "imag"), _like(_NON_FINITE)),
    **dict.fromkeys(("as_string", "as_strings"), _any),
    # What a node was made from: kept beside it, at most looked up.
    **dict.fromkeys(("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node", "custom"), _any),
}


def _cut(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "…")
