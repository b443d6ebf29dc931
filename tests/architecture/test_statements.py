"""Every statement that is looked up by name is in the file in which it is looked up."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from infra.postgres import split_queries

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "benchmarks", "gpu_worker", "infra", "streams")


def package_of(node: ast.AST) -> str | None:
    """The package in `queries("package")`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "queries":
        argument = node.args[0]
        return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None
    return None


def lookups(source: str) -> list[tuple[str, str]]:
    """(package, name) of each statement that a module looks up, straight or by a name given to the file."""
    return _lookups(ast.parse(source), {})


def _lookups(scope: ast.AST, known: dict[str, str]) -> list[tuple[str, str]]:
    inner: list[ast.AST] = []
    own: list[ast.AST] = []
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner.append(node)
        else:
            own.append(node)
            waiting += ast.iter_child_nodes(node)
    files = dict(known)
    for node in own:
        for target in node.targets if isinstance(node, ast.Assign) else []:
            for name, value in _pairs(target, node.value):
                package = package_of(value)
                if package is not None:
                    files[name.id] = package
    found: list[tuple[str, str]] = []
    for node in own:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            package = package_of(node.value)
            if package is None and isinstance(node.value, ast.Name):
                package = files.get(node.value.id)
            if package is not None:
                found.append((package, str(node.slice.value)))
    return found + [one for node in inner for one in _lookups(node, files)]


def _pairs(target: ast.AST, value: ast.AST) -> list[tuple[ast.Name, ast.AST]]:
    if isinstance(target, ast.Name):
        return [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return [pair for t, v in zip(target.elts, value.elts, strict=True) for pair in _pairs(t, v)]
    return []


def test_every_statement_is_where_it_is_looked_up() -> None:
    called: defaultdict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for package_name, name in lookups(path.read_text(encoding="utf-8")):
                called[package_name].add(name)
    assert len(called) > 5
    for package, names in called.items():
        there = split_queries((ROOT / package.replace(".", "/") / "queries.sql").read_text(encoding="utf-8")).keys()
        assert not names - there, f"{package}: looked up, and not there"


def test_the_look_sees_all_ways_in_which_statements_are_looked_up() -> None:
    source = """
sql, other = queries("a.b"), 3
def one():
    queries("c")["straight"]
    sql["named"]
def two():
    sql = queries("d")
    sql["own"]
"""
    assert sorted(lookups(source)) == [("a.b", "named"), ("c", "straight"), ("d", "own")]
