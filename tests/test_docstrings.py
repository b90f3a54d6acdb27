"""Names in back quotes of the package's docstrings exist: a rename that leaves one there is seen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.kit.places import ROOT

PACKAGE = ROOT / "vlmcompress"
# These write of others' code, whose names are not looked up, in modules that may be called like ours.
FOREIGN = re.compile(r"vLLM|transformers|llama\.cpp|compressed-tensors|mlx|auto-round|data set|arXiv|OpenVINO")
OTHERS = {"vllm", "openvino", "gguf"}
NOT_OURS = {
    *("parse_multi_choice_response", "parse_open_response", "eval_open"),  # MMMU's evaluation
    *("post_self_attn_layernorm", "post_mlp_layernorm", "rotate_half"),  # of models
    *("convert_hf_quant_config_format", "interrupt_main"),  # ModelOpt, Python
}
SUFFIXES = {"json", "jsonl", "md", "sh", "yaml", "py", "ipynb", "safetensors"}


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """The docstrings of a module, its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            yield node.body[0].value


def words(tree: ast.Module) -> set[str]:
    """Names that a module's code uses or defines, and the words of its strings but for docstrings."""
    prose, names = {id(node) for node in docstrings(tree)}, set[str]()
    for node in ast.walk(tree):
        values = (getattr(node, key, None) for key in ("id", "attr", "arg", "name", "asname"))
        names |= {value for value in values if isinstance(value, str)}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            names |= set(re.findall(r"\w+", node.value))
    return names


def test_names_in_docstrings_exist() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    by_module: dict[str, set[str]] = {}
    for path, tree in trees.items():
        package = path.name == "__init__.py"
        module = path.parent.name if package else path.stem
        by_module.setdefault(module, set()).update(
            words(tree), {child.stem for child in path.parent.iterdir()} if package else ()
        )
    everything = set[str]().union(*by_module.values(), by_module)
    unknown = []
    for path, tree in trees.items():
        for text in (node.value for node in docstrings(tree)):
            for name in re.findall(r"(?<!`)`([\w.]+)(?:\(\))?`(?!`)", text):
                *modules, last = name.split(".")
                if modules and modules[-1] in by_module and last not in SUFFIXES:
                    exists = modules[0] in OTHERS or last in by_module[modules[-1]]
                else:
                    ours = re.fullmatch(r"[a-z]\w+_\w+", name) and name not in NOT_OURS and not FOREIGN.search(text)
                    exists = not ours or name in everything
                if not exists:
                    unknown.append(f"{path.relative_to(ROOT)}: `{name}`")
    assert not unknown, "\n".join(unknown)
