"""The arrow of imports: scripts -> runtime -> drafters."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH_ONLY = {"sampling", "tree", "verify"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def test_drafters_never_import_runtime():
    files = list((ROOT / "src" / "drafters").rglob("*.py"))
    assert len(files) > 10
    assert [str(path) for path in files if "runtime" in imported(path)] == []


def test_the_acceptance_rule_needs_torch_alone():
    for name in TORCH_ONLY:
        path = ROOT / "src" / "runtime" / f"{name}.py"
        assert imported(path) <= {"torch", "runtime", "collections", "dataclasses", "hashlib", "__future__"}, name


def test_library_code_never_prints_and_never_unpickles():
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                if path.name == "convert.py" and ast.unparse(node.func) == "torch.load":
                    assert "weights_only=True" in map(ast.unparse, node.keywords)  # the one converter of pickles
                    continue
                assert ast.unparse(node.func) not in {"print", "torch.load", "pickle.load", "eval", "exec"}, path
