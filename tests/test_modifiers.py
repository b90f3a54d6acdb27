"""Our modifiers in llm-compressor's own `oneshot`: as instances and from YAML, up to the checkpoint that it saves.

The family is one whose layers are called alike in memory and on disk: for others llm-compressor 0.14 writes an `ignore` of
names on disk, which transformers 5 compares with those in memory, and the checkpoint does not load.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from llmcompressor import oneshot
from llmcompressor.core import reset_session
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.kit import tiny
from vlmcompress import models, modifiers
from vlmcompress.calibration import block_search
from vlmcompress.calibration.gradient_pass import gradients
from vlmcompress.calibration.solve import QuantMethod
from vlmcompress.data import encode, load_samples
from vlmcompress.errors import UserError
from vlmcompress.models import decoder_blocks
from vlmcompress.quantizers import mbq
from vlmcompress.statistics.balance import Sensitivity
from vlmcompress.statistics.gradients import sensitivities

IGNORE = ["re:.*lm_head", "re:.*visual.*"]
SCHEME = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 3, "group_size": 32, "strategy": "group"}}}
ASYMMETRIC = {"group_0": {"targets": ["Linear"], "weights": SCHEME["group_0"]["weights"] | {"symmetric": False}}}
COUNT = {1: 2, 2: 6, 3: 1}  # tokens of the modalities, for which a ratio balance is that of repeating them:
REPEAT = {1: 3, 2: 1, 3: 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("world"), np.random.default_rng(0)
    tiny.build("qwen3-vl", folder / "model")
    rows = []
    for i in range(3):
        Image.fromarray(random.integers(0, 256, (56, 56, 3), np.uint8)).save(folder / f"{i}.png")
        rows.append({"id": str(i), "image": f"{i}.png", "question": "what is it", "answer": "red or green"})
    (folder / "calib.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def run(folder, recipe, out=None):
    """A fresh model through stock `oneshot`."""
    reset_session()
    vlm = models.load(folder / "model")
    data = modifiers.dataloader(vlm.model, vlm.processor, folder / "calib.jsonl", samples=3)
    oneshot(
        model=vlm.model,
        processor=vlm.processor,
        recipe=recipe,
        dataset=data,
        num_calibration_samples=3,
        use_loss_mask=True,
        sequential_targets=[models.layer_class(vlm.model, vlm.spec)],
        **({"output_dir": str(out)} if out else {}),
    )
    return vlm.model


def session(monkeypatch, masks):
    state = SimpleNamespace(loss_masks=masks, current_batch_idx=0)
    monkeypatch.setattr(modifiers, "active_session", lambda: SimpleNamespace(state=state))


@pytest.mark.parametrize(
    ("balance", "repeat"),
    [
        ("off", {1: 1, 2: 1, 3: 1}),
        ("ratio", REPEAT),
        ({"text": 0, "vision": 3, "answer": 1}, {1: 0, 2: 1, 3: 2}),
        ("auto", {1: 2, 2: 1, 3: 4}),
        ("mbq", {1: 0, 2: 1, 3: 2}),
    ],
    ids=str,
)
def test_weights_repeat_rows(monkeypatch, balance, repeat):
    """Oracle: stock GPTQ's Hessian of inputs whose rows are repeated as often as the balance asks for, up to a factor."""
    module, codes = torch.nn.Linear(8, 4), [code for code, count in COUNT.items() for _ in range(count)]
    x = torch.randn(1, len(codes) + 1, 8)
    mask = torch.tensor([[0, *codes]])
    ours, stock = modifiers.BalancedGPTQModifier(balance=balance), GPTQModifier()
    ours._module_names[module] = "layer"
    ours._sensitivity["layer"] = Sensitivity({"text": 1.0, "vision": 0.5, "answer": 2.0}, rho=3.0)
    session(monkeypatch, [mask])
    ours.calibrate_module(module, (x,), None)
    rows = [x[0, i] for i, code in enumerate(mask[0].tolist()) for _ in range(repeat.get(code, 0))]
    stock.calibrate_module(module, (torch.stack(rows)[None],), None)
    weighted, expected = ours._hessians[module], stock._hessians[module]
    torch.testing.assert_close(weighted / weighted.trace(), expected / expected.trace())
    kept = [x[0, i] for i, code in enumerate(mask[0].tolist()) if code]
    if balance == "off":
        torch.testing.assert_close(weighted, 2 * torch.stack(kept).T @ torch.stack(kept))


def test_tokens_of_another_shape_are_all_alike(monkeypatch):
    """Tokens that were sent to an expert have lost their places."""
    module, x = torch.nn.Linear(8, 4), torch.randn(5, 8)
    ours = modifiers.BalancedGPTQModifier(balance="ratio")
    session(monkeypatch, [torch.tensor([[1, 2, 3]])])
    ours.calibrate_module(module, (x,), None)
    torch.testing.assert_close(ours._hessians[module], 2 * x.T @ x)


def test_mbq_in_a_recipe_finds_what_ours_finds(folder):
    """Oracle: `search_blocks` with the gradients measured beforehand. Norms end divided by its scales."""
    source = models.load(folder / "model")
    blocks = decoder_blocks(source.model, source.spec)
    batches = encode(load_samples(str(folder / "calib.jsonl"), samples=3, seed=0), source)
    names = [{group.name: group.linears for group in groups} for groups in blocks]
    measured = sensitivities(gradients(source, batches), names)
    method = QuantMethod(mbq, mbq.Options(bits=3, group_size=32, objective="mae"))
    scales = block_search.search_blocks(source, blocks, batches, method, measured)
    assert any((scale != 1).any() for scale in scales.values()), "the test needs a model on which scaling pays"
    model = run(folder, [modifiers.MBQModifier(), QuantizationModifier(config_groups=ASYMMETRIC, ignore=IGNORE)])
    for group in (group for groups in blocks for group in groups if group.smooth_kind == "norm"):
        before, after = (m.get_submodule(group.smooth).weight for m in (source.model, model))
        torch.testing.assert_close(after, (before / scales[group.layer, group.name]).to(before.dtype))


@pytest.mark.parametrize("yaml", [False, True])
@pytest.mark.parametrize("name", ["mbq", "gptq"])
def test_stock_oneshot_saves_what_transformers_loads(folder, tmp_path, name, yaml):
    if not yaml:
        smooth = [
            modifiers.MBQModifier(rho=0.5, objective="mse"),
            QuantizationModifier(config_groups=SCHEME, ignore=IGNORE),
        ]
        recipe = smooth if name == "mbq" else modifiers.BalancedGPTQModifier(config_groups=SCHEME, ignore=IGNORE)
    else:
        smooth = {
            "MBQModifier": {"rho": {"re:.*": 0.5}},
            "QuantizationModifier": {"config_groups": SCHEME, "ignore": IGNORE},
        }
        gptq = {"BalancedGPTQModifier": {"balance": "mbq", "config_groups": SCHEME, "ignore": IGNORE}}
        stage = {"quant_stage": {"quant_modifiers": smooth if name == "mbq" else gptq}}
        recipe = str(tmp_path / "recipe.yaml")
        (tmp_path / "recipe.yaml").write_text(json.dumps(stage))
    run(folder, recipe, tmp_path / "out")
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    decoder = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "language_model" in n]
    assert len(decoder) == 14 and all(m.quantization_scheme.weights.num_bits == 3 for m in decoder)
    assert (
        type(recipe if isinstance(recipe, str) else None) is str
        or "Modifier" in (tmp_path / "out/recipe.yaml").read_text()
    )


def test_balance_changes_the_result(folder):
    """Stock GPTQ and ours without balance agree (nothing here is padding); a balance differs."""
    weights = {}
    for name, recipe in {
        "stock": GPTQModifier(config_groups=SCHEME, ignore=IGNORE),
        "off": modifiers.BalancedGPTQModifier(config_groups=SCHEME, ignore=IGNORE, balance="off"),
        "ratio": modifiers.BalancedGPTQModifier(config_groups=SCHEME, ignore=IGNORE, balance="ratio"),
    }.items():
        weights[name] = run(folder, recipe).get_parameter("model.language_model.layers.0.mlp.up_proj.weight").detach()
    assert torch.equal(weights["stock"], weights["off"])
    assert not torch.equal(weights["off"], weights["ratio"])


def test_bad_input(folder):
    with pytest.raises(ValueError, match="balance must be"):
        modifiers.BalancedGPTQModifier(balance="most")
    both = [modifiers.MBQModifier(rho=1.0), modifiers.BalancedGPTQModifier(config_groups=SCHEME, ignore=IGNORE)]
    with pytest.raises(UserError, match="run oneshot twice"):
        run(folder, both)
    with pytest.raises(UserError, match="rho names no weight for"):
        run(folder, [modifiers.MBQModifier(rho={"x": 1.0}), QuantizationModifier(config_groups=SCHEME, ignore=IGNORE)])
