"""README and docs say what is: commands parse and run, tables are what the scripts print, links resolve, examples work."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image
from pydantic import BaseModel

from tests.kit import forks
from tests.kit.places import DEMO_LLAVA, ROOT
from vlmcompress import cli
from vlmcompress.evaluation import results
from vlmcompress.evaluation.accuracy import gate
from vlmcompress.export import manifest
from vlmcompress.models.data.samples import to_sample
from vlmcompress.quantization.schemes import rtn, solve
from vlmcompress.recipe import targets
from vlmcompress.reduction import methods
from vlmcompress.reduction.methods import Signals, TokenCounter
from vlmcompress.utils.registry import Registry
from vlmcompress.utils.settings import bundled_recipes

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}


def fenced(kind: str) -> list[tuple[str, str]]:
    """(page, content) of every block of code of a kind."""
    pattern = re.compile(rf"^```{kind}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [(page, block) for page, text in TEXTS.items() for block in pattern.findall(text)]


def lines() -> list[tuple[str, str]]:
    """(page, line) of every line of a shell in README and docs."""
    shells = [(page, block.splitlines()) for page, block in fenced("bash")]
    indented = [(page, [x[4:] for x in text.splitlines() if x.startswith("    ")]) for page, text in TEXTS.items()]
    return [(page, line) for page, block in [*shells, *indented] for line in block]


def between(name: str) -> str:
    section = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", "".join(TEXTS.values()), re.DOTALL)
    assert section, f"no page has a section marked {name}"
    return section.group(1).strip()


def printed(*command: str) -> str:
    python = forks.python(*forks.OURS)
    return subprocess.run([python, *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout


COMMANDS = sorted({line for _, line in lines() if line.startswith("vlmcompress ")})
SCRIPTS = sorted({name for text in TEXTS.values() for name in re.findall(r"\bscripts/[\w./]+\w", text)})


def test_commands_parse():
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        assert cli.parse(words[1:]).verb in cli.VERBS, line


NEEDS_MORE = ("STATS", "scorer.safetensors", "thresholds.json", "my-lora", "recipe.yaml", "http")
"""What commands read that another command makes, or that only the reader has."""
PLANNED = [
    line
    for line in COMMANDS
    if line.split()[1] in ("quantize", "check") and not any(name in line for name in NEEDS_MORE)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder as a reader's: a model without bundled data, rows and images of their own."""
    from tests.kit.tiny import build

    folder = tmp_path_factory.mktemp("reader")
    build("qwen2_vl", folder / "MODEL")
    (folder / "photos").mkdir()
    for number in range(4):
        Image.new("RGB", (56, 56 + 28 * number)).save(folder / "photos" / f"{number}.png")
    row = {"image": "photos/0.png", "question": "What is it?", "answer": "Black."}
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    clip = {"video": ["photos/0.png"] * 4, "question": "What moves?", "answer": "It."}
    (folder / "clips.jsonl").write_text("".join(json.dumps(clip) + "\n" for _ in range(4)))
    row = {"photo_bytes": (folder / row["image"]).read_bytes(), "q": row["question"], "a": row["answer"]}
    pq.write_table(pa.Table.from_pylist([row] * 4), folder / "set.parquet")
    return folder


@pytest.mark.parametrize("line", PLANNED)
def test_commands_work_on_another_model(line, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    words = [re.sub(r"^Qwen/.*", "MODEL", word) for word in shlex.split(line, comments=True)[1:]]
    if words[0] == "quantize" and "--dry-run" not in words:
        words.append("--dry-run")
    assert cli.main(words) == 0, capsys.readouterr().err


def test_every_verb_is_shown():
    assert {line.split()[1] for line in COMMANDS} >= set(cli.VERBS)


def test_scripts_exist():
    commands = {line for _, line in lines()}
    for name in SCRIPTS:
        assert (ROOT / name).exists(), name
        if any(line.startswith(name) for line in commands):
            assert (ROOT / name).stat().st_mode & 0o111, f"{name} is shown as a command and is not executable"


def test_paths_exist():
    """Paths of files that pages name; the folders of the package are `test_every_package_is_described`'s."""
    pattern = re.compile(r"`((?:vlmcompress|recipes|eval|tests|docs)/[\w./-]+\.(?:py|yml|yaml|md|json|svg))`")
    for page, text in TEXTS.items():
        for path in pattern.findall(text):
            assert (ROOT / path).exists() or "NAME" in path or path in EXAMPLES, f"{page} names {path}"


EXAMPLES = {"vlmcompress/reduction/methods/unlike.py", "vlmcompress/quantization/schemes/six.py"}
"""Files that a page says one could write."""


def test_every_package_is_described():
    tree = TEXTS["docs/architecture.md"].split("```")[1]
    packages = {path.parent.name for path in (ROOT / "vlmcompress").glob("*/__init__.py")}
    assert packages == set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))


def test_files_of_the_walks_exist():
    """docs/architecture.md: at most twelve stations a walk, each with a file and a name that is defined in it."""
    _, _, text = TEXTS["docs/architecture.md"].partition("\n## Three walks\n")
    walks = text.split("\n### ")[1:]
    assert len(walks) == 3
    for walk in walks:
        stations = re.split(r"^\d+\. ", walk, flags=re.MULTILINE)[1:]
        assert 1 < len(stations) <= 12
        for station in stations:
            places = re.findall(r"`([\w/]+\.py):\s+(\w+)`", station)
            assert places, f"no file and name: {station}"
            for file, name in places:
                body = ast.parse((ROOT / "vlmcompress" / file).read_text()).body
                assigned = {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}
                assigned |= {
                    ast.unparse(name) for node in body if isinstance(node, ast.Assign) for name in node.targets
                }
                names = assigned | {getattr(node, "name", None) for node in body}
                assert name in names, f"docs/architecture.md: {file} has no {name}"


@pytest.mark.parametrize("page", TEXTS)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{page} links to {target}"


def anchors(text: str) -> set[str]:
    """What one can link to within a page, as GitHub makes it of headings."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def cells(section: str) -> list[list[str]]:
    """The rows of a Markdown table without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in between(section).splitlines()[2:]]


def test_the_gain_on_the_first_screen_is_what_plan_computes_and_the_gpu_took():
    """Weights and requests are those of docs/planning.md's session, seconds those of docs/results.md's table."""
    plan = {}
    for line in between("plan").splitlines():
        scheme, _, figures = line.strip().partition(" ")
        if match := re.search(r"([\d.]+) GB +[\d.]+ GB +([\d,]+) +([\d,]+)", figures):
            plan[scheme] = (f"{float(match[1]):.1f} GB", match[2], match[3])
    seconds = dict(re.findall(r"^\| qwen2.5-vl-7b-(\S+) \| \d+ \| \d+ \| (\d+) \|", between("gpu"), re.MULTILINE))

    for name, weights, requests, made in cells("gain"):
        scheme = next((word for word in ("fp8", "bf16") if word in name.lower()), "gptq-plus")
        size, every, quarter = plan[scheme]
        assert (weights, requests) == (size, quarter if "quarter" in name else every), name
        assert not made or made == f"{seconds[scheme]} s", name


def test_readme_has_every_machine_with_its_scheme():
    for _, machines, default, throughput in cells("targets"):
        for name in re.findall(r"`(.+?)`", machines):
            schemes = targets.TARGETS[name].schemes
            assert default.startswith(f"`{schemes[None]}`"), name
            assert throughput == ("" if schemes[None] == schemes["throughput"] else f"`{schemes['throughput']}`"), name
    assert sorted(re.findall(r"`(.+?)`", " ".join(row[1] for row in cells("targets")))) == sorted(targets.TARGETS)


@pytest.mark.parametrize(
    ("script", "section"),
    [
        ("compatibility", "compatibility"),
        ("compatibility", "overview"),
        ("kernel_choice", "kernels"),
        ("bench_accuracy", "accuracy"),
        ("bench_accuracy", "boxes"),
        ("bench_accuracy", "pages"),
        ("bench_accuracy", "clips"),
        ("bench_accuracy", "photo"),
        ("compare_weights", "weights"),
        ("calibration_cost", "calibration_cost"),
        ("token_budget", "token_budget"),
        ("mixed_traffic", "mixed"),
        ("real_sizes", "real_sizes"),
        ("kept_share", "kept_share"),
        ("earlier", "mlx"),
        ("earlier", "reducers"),
        ("earlier", "joint"),
        ("earlier", "serving"),
        ("earlier", "statistics"),
        ("earlier", "images"),
        ("earlier", "full_size"),
        ("earlier", "peers"),
        ("earlier", "growth"),
        ("earlier", "engine_costs"),
        ("earlier", "gguf"),
        ("earlier", "drafts"),
        ("earlier", "engines"),
        ("earlier", "searches"),
        ("earlier", "smaller"),
        ("earlier", "weighting"),
        ("earlier", "echo"),
        ("earlier", "token_weights"),
        ("earlier", "mixed_speed"),
    ],
)
def test_tables_are_the_measured_ones(script, section, monkeypatch, capsys):
    several = script == "earlier" or section in ("boxes", "pages", "clips", "photo")
    flags = {"overview": ["--overview"]}.get(section, [section] * several)
    folder = ROOT / "scripts/measure"
    monkeypatch.syspath_prepend(folder)  # in this process, which has imported nearly all that the scripts do
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--render", *flags])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    runpy.run_path(str(folder / f"{script}.py"), run_name="__main__")
    *table, last = capsys.readouterr().out.strip().splitlines()
    json.loads(last)
    assert between(section) == "\n".join(table), f"run scripts/measure/{script}.py --render and put it into docs"


def test_the_page_of_models_is_complete():
    """Families with their model types, and those that are not supported with the reason."""
    from vlmcompress.models import UNSUPPORTED, all_specs

    page = TEXTS["docs/models.md"]
    for spec in all_specs():
        names = ", ".join(f"`{name}`" for name in spec.model_types)
        assert f"\n| `{spec.family}` | {names} |" in page
    assert all(f"\n| `{name}` | {why} |" in page for name, why in UNSUPPORTED.items())


QWEN_7B = {
    **{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "dtype": "bfloat16"},
    **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000},
    "tie_word_embeddings": False,
    "vision_config": {
        **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584},
        **{"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112},
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
PATCHES = {
    **{"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56**2, "max_pixels": 3584**2},
    **{"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
}


def test_the_example_of_plan_is_its_output(tmp_path, monkeypatch, capsys):
    command, *session = between("plan").strip("`\n").splitlines()
    words = shlex.split(command.removeprefix("$ "))
    folder = tmp_path / words[2]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    (folder / "preprocessor_config.json").write_text(json.dumps(PATCHES))
    monkeypatch.chdir(tmp_path)
    assert cli.main(words[1:]) == 0
    assert capsys.readouterr().out.splitlines() == session, "run it and put what it prints into docs/planning.md"


def test_requests_that_fit_a_card_are_what_plan_computes(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PATCHES))
    monkeypatch.chdir(tmp_path)
    for card, *requests in cells("cards"):
        assert cli.main(["plan", ".", "--target", card.split("`")[1]]) == 0
        pattern = r"^  (bf16|int8|gptq-plus) .* GB +([\d,]+)(?: |$)"
        fits = dict(re.findall(pattern, capsys.readouterr().out, re.MULTILINE))
        assert requests == [fits["bf16"], fits["int8"], fits["gptq-plus"]], card


def test_the_reference_of_recipes_is_printed():
    assert TEXTS["docs/recipes.md"] == printed("scripts/recipe_reference.py"), "run scripts/recipe_reference.py"


def test_the_table_of_readers_is_printed():
    assert between("readers") == printed("scripts/readers_table.py").strip(), "run scripts/readers_table.py"


def test_recipes_in_pages_are_recipes(tmp_path):
    from vlmcompress.recipe import resolve

    model = DEMO_LLAVA
    for number, (page, block) in enumerate(fenced("yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block)
        if "suites" in yaml.safe_load(block):
            assert gate.load(file).suites, page
        else:
            assert resolve({"model": str(model)}, file).recipe.scheme, page


def test_bundled_recipes_in_commands_exist():
    named = {recipe for line in COMMANDS for recipe in re.findall(r"--recipe ([\w-]+)(?= |$)", line)}
    assert named and named <= bundled_recipes().keys()


def test_rows_of_data_are_read(tmp_path):
    rows = [
        json.loads(line) for _, block in fenced("json") for line in block.splitlines() if line.startswith('{"image"')
    ]
    for row in rows:
        image = tmp_path / row["image"]
        image.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(image)
    samples = [to_sample(row, "1", origin="page", folder=tmp_path) for row in rows]
    assert len(samples) >= 3 and all(sample.question and sample.answer for sample in samples)


def fields(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def test_formats_documents_every_field():
    text = TEXTS["docs/formats.md"]
    classes = [cls for cls in vars(results).values() if isinstance(cls, type) and issubclass(cls, BaseModel)]
    expected = set.union(*(fields(cls) for cls in classes), fields(gate.GateFile), fields(gate.SuiteRules)) - {"suite"}
    expected |= fields(gate.SpeedRule)
    for record in (manifest.Manifest, manifest.CalibrationData):
        expected |= record.__annotations__.keys()
    expected |= {field.name for field in dataclasses.fields(TokenCounter)}
    named = set(re.findall(r"`(?:[\w.]+\.)?(\w+)`", text))
    assert expected <= named, f"docs/formats.md does not name {sorted(expected - named)}"


@pytest.fixture
def contributed(tmp_path, monkeypatch) -> Path:
    """A folder for PYTHONPATH with CONTRIBUTING's scheme and reducer as a package, which joins through entry points."""
    scheme, reducer = (block for page, block in fenced("python") if page == "CONTRIBUTING.md")
    (tmp_path / "six_scheme.py").write_text(scheme)
    (tmp_path / "unlike_reducer.py").write_text(reducer)
    about = tmp_path / "unlike_reducer-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: unlike-reducer\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[vlmcompress.reduction.methods]\nunlike = unlike_reducer\n[vlmcompress.quantization.schemes]\nsix = six_scheme\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_example_scheme_is_right(contributed):
    """By its entry point it rounds as `rtn` does with six bits, and is listed."""
    registry = Registry("vlmcompress.quantization.schemes", "scheme", entry="SCHEME")
    method, weight = registry.get("six"), torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    solved = solve(method, [weight], None, method.OPTIONS(), torch.float32).weights[0]
    expected = solve(rtn.SCHEME, [weight], None, rtn.Options(bits=6), torch.float32).weights[0]
    assert torch.equal(solved.q, expected.q) and torch.equal(solved.scale, expected.scale)
    assert method.needs(method.OPTIONS()).statistics == set() and registry.aliases("six") == ()
    assert registry.summary("six").startswith("Six bits, rounded to nearest")


def test_the_example_reducer_is_right(contributed):
    method = dataclasses.replace(
        Registry("vlmcompress.reduction.methods", "reducer", entry="REDUCER").get("unlike"), keep=0.25
    )
    features = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    reduction = methods.reduce(method, Signals((1, 6, 8), features=features))
    mean = features.mean(0)
    likeness = {i: float(torch.cosine_similarity(features[i], mean, dim=0)) for i in range(48)}
    assert reduction.anchor.tolist() == sorted(sorted(likeness, key=lambda i: likeness[i])[:12])
    assert importlib.util.find_spec("vlmcompress.reduction.methods.unlike") is None, (
        "the example is no entry of the package"
    )


def test_the_example_reducer_is_known_everywhere(contributed):
    Image.effect_noise((84, 84), 80).convert("RGB").save(contributed / "noise.png")
    path = os.pathsep.join([str(contributed), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = ["inspect", "eval/demo/demo-llava", str(contributed / "noise.png"), "--reduce", "unlike:0.25"]
    done = subprocess.run(
        [sys.executable, "-m", "vlmcompress", *command, "-o", str(contributed / "out.png"), "--json"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "unlike:0.25" in done.stdout and (contributed / "out.png").stat().st_size > 1000
