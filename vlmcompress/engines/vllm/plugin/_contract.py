"""Everything in vLLM that the plugin depends on: where it is, its parameters, and its purpose.

The versions in `TESTED` were tested. In a newer version the plugin checks everything here in vLLM's source (`_source`) when it
is registered; features broken by a change are left out or refused with one line that names the change, and the rest works.
`PARTS` groups the entries by what would break: `""` every reduced checkpoint, a family's name that family, other names a
feature.

Public interfaces are used where they exist (`register_model`, `register_linear_kernel`, `register_processor`, the fields of
configs); for the rest 0.33 has none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vlmcompress.engines.vllm.plugin._source import Source, parameters

TESTED = ((0, 32), (0, 33))
"""The tested versions of vLLM, from the oldest supported to the newest."""


@dataclass(frozen=True)
class Reach:
    """One dependency on vLLM.

    Attributes:
        module: module below `vllm`.
        what: `Class.attribute`, `name`; or with the arguments of our calls, `Class.method(a, b)`.
        why: its purpose.
        overridden: whether vLLM calls our override, which takes exactly these arguments.
    """

    module: str
    what: str
    why: str
    overridden: bool = False

    def problem(self, source: Source) -> str | None:
        """How it differs in this source; None if it does not."""
        name, called, rest = self.what.partition("(")
        definition = source.find(self.module, name)
        where = f"{self.module}.{name}"
        if definition is None:
            return f"{where} is gone ({self.why})"
        if not called:
            return None
        takes = [part.strip() for part in rest.rstrip(")").split(",") if part.strip()]
        there = parameters(definition[1])
        if there is None:
            return f"{where} is no function ({self.why})"
        if lost := [part for part in takes if part not in there.names and not there.rest]:
            return f"{where} takes no '{lost[0]}' ({self.why})"
        if new := [part for part in (there.names if self.overridden else there.required) if part not in takes]:
            return f"{where} takes '{new[0]}', which is new ({self.why})"
        return None


def _reaches(module: str, why: str, *names: str, ours: Iterable[str] = ()) -> list[Reach]:
    """Dependencies on one module for one purpose. `ours`: methods of vLLM that ours override (`Reach.overridden`)."""
    return [Reach(module, what, why) for what in names] + [Reach(module, what, why, True) for what in ours]


_MODELS = "model_executor.models"
_LINEAR = "model_executor.kernels.linear"
_COMPRESSED = "model_executor.layers.quantization.compressed_tensors"
_FORWARD = "forward(input_ids, positions, intermediate_tensors, inputs_embeds)"


def _model(
    module: str,
    name: str,
    *parts: str,
    images: str = "_process_image_input(image_input)",
    graphs: bool = False,
    adapters: bool = True,
) -> list[Reach]:
    """A family's class, for what all families need: the mixins before it, `_loading` and `_positions`.

    `images`: its method that makes rows of images, which are reduced there; `graphs`, `adapters`: whether vLLM's class records
    its encoder's CUDA graphs, and takes adapters.
    """
    where = f"{_MODELS}.{module}"
    tokens = f"{name}.get_mm_lora_token_counts(modality, mm_kwargs, num_mm_embeds)"
    recorded = (f"{name}.get_encoder_cudagraph_config()",) if graphs else ()
    return [
        *_reaches(
            where,
            "places of tokens come out of the encoder's rows, and into positions",
            ours=(
                f"{name}.embed_input_ids(input_ids, multimodal_embeddings, is_multimodal)",
                f"{name}.{_FORWARD}",
                f"{name}.embed_multimodal()",
            ),
        ),
        *_reaches(where, "an adapter in the encoder gets the full image", ours=(tokens,) if adapters else ()),
        *_reaches(where, "tokens are reduced after the encoder", ours=(f"{name}.{images}", *recorded)),
        *_reaches(where, "what the family is made of", name, *parts),
    ]


def _attention(module: str, name: str, layer: str, *names: str) -> list[Reach]:
    """A tower whose layers merge tokens (`_encoder.EncoderMerging`)."""
    parts = ("attn", "scale", "num_heads", *names)
    return _reaches(
        f"{_MODELS}.{module}",
        "merging within the encoder replaces the attention's kernel and looks at its keys",
        *(f"{name}.{part}" for part in parts),
        *layer.split(),
    )


_CLIP = [
    *_attention(
        "clip",
        "CLIPAttention",
        "CLIPEncoderLayer.self_attn CLIPEncoderLayer.layer_norm2 CLIPEncoder.layers",
        "num_heads_per_partition",
        "tp_size",
    ),
    *_reaches(f"{_MODELS}.clip", "attention of CLS is heard at this layer", "CLIPAttention.qkv_proj"),
]
_SIGLIP = _attention(
    "idefics2_vision_model",
    "Idefics2VisionAttention",
    "Idefics2EncoderLayer.self_attn Idefics2EncoderLayer.layer_norm2",
    "num_heads_per_partition",
)
_QWEN = [
    *_reaches(
        f"{_MODELS}.qwen2_vl",
        "placeholders in the prompt are those of the tokens that are left",
        ours=(
            "Qwen2VLProcessingInfo.get_supported_mm_limits()",
            "Qwen2VLProcessingInfo._merge_and_resolve_mm_processor_kwargs(mm_kwargs)",
        ),
    ),
]


def _qwen(module: str, prefix: str) -> list[Reach]:
    """A Qwen family: its processing, its model."""
    where, model = f"{_MODELS}.{module}", f"{prefix}ForConditionalGeneration"
    size = "image_width, image_height, num_frames, do_resize, image_processor, mm_kwargs, modality"
    return [
        *_QWEN,
        *_reaches(
            where,
            "placeholders in the prompt are those of the tokens that are left",
            ours=(
                f"{prefix}ProcessingInfo._get_vision_info({size})",
                f"{prefix}MultiModalProcessor._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)",
            ),
        ),
        *_reaches(where, "tokens are reduced after the encoder", ours=(f"{model}._process_video_input(video_input)",)),
        *_model(module, model, f"{model}.visual", graphs=True),
    ]


_GLM = [
    *_reaches(
        f"{_MODELS}.glm4_1v",
        "placeholders in the prompt are those of the tokens that are left",
        ours=(
            "Glm4vProcessingInfo._get_vision_info(image_width, image_height, num_frames, do_resize, max_image_pixels)",
            "Glm4vProcessingInfo.get_supported_mm_limits()",
            "Glm4vMultiModalProcessor._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)",
        ),
    ),
    *_model("glm4_1v", "Glm4vForConditionalGeneration", graphs=True),
]
_QWEN3 = [
    *_qwen("qwen3_vl", "Qwen3VL"),
    *_reaches(
        f"{_MODELS}.qwen3_vl",
        "a video's timestamps stay between what is left of its frames",
        "Qwen3VLProcessingInfo.get_video_processor()",
        "Qwen3VLMultiModalProcessor.get_video_repl(tokens_per_frame, timestamps, tokenizer, vision_start_token_id, "
        "vision_end_token_id, video_token_id)",
        "Qwen3VLForConditionalGeneration._tokenizer",
        ours=("Qwen3VLProcessingInfo.get_max_video_tokens(seq_len, mm_counts)",),
    ),
]

_SERVED = [
    *_reaches(
        f"{_MODELS}.registry",
        "reduced architectures have names of their own",
        "_ModelRegistry.register_model(model_arch, model_cls)",
    ),
    *_reaches(f"{_MODELS}", "reduced architectures have names of their own", "ModelRegistry"),
    *_reaches(
        f"{_MODELS}.config",
        "a checkpoint is looked at when it is loaded",
        "MODELS_CONFIG_MAP",
        ours=(
            "VerifyAndUpdateConfig.verify_and_update_config(vllm_config)",
            "VerifyAndUpdateConfig.verify_and_update_model_config(model_config)",
        ),
    ),
    *_reaches("transformers_utils.config", "plain RoPE runs through M-RoPE", "uses_mrope(config)"),
    *_reaches("utils.platform_utils", "indices go to the device without a wait", "is_pin_memory_available()"),
    *_reaches(
        "multimodal.processing",
        "processors say which tokens are left",
        ours=(
            "BaseMultiModalProcessor.apply(inputs, timing_ctx)",
            "BaseMultiModalProcessor._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)",
            "BaseMultiModalProcessor._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)",
            "BaseMultiModalProcessor._maybe_apply_prompt_updates(mm_items, mm_res)",
            "BaseMultiModalProcessor._postprocess_hf_mm_data(mm_inputs, hf_processor_mm_kwargs, processed_data)",
            "BaseMultiModalProcessor._apply_hf_processor_main(mm_items, hf_kwargs)",
            "BaseMultiModalProcessor.get_dummy_inputs(seq_len, mm_counts, mm_options)",
            "BaseProcessingInfo.get_mm_max_tokens_per_item(seq_len, mm_counts)",
        ),
    ),
    *_reaches(
        "multimodal.processing",
        "names of images in caches say which reducer made them",
        ours=(
            "BaseMultiModalProcessor._get_mm_hashes(inputs)",
            "BaseMultiModalProcessor._get_cache_missing_processor_kwargs(inputs, mm_is_cached)",
        ),
    ),
    *_reaches(
        "multimodal.processing",
        "processors read the request, the config and the tokenizer",
        "ProcessorInputs.hf_processor_mm_kwargs",
        "ProcessorInputs.mm_data_items",
        "BaseProcessingInfo.get_hf_config()",
        "BaseProcessingInfo.get_hf_processor()",
        "BaseProcessingInfo.get_tokenizer()",
        "BaseProcessingInfo.ctx",
    ),
    *_reaches(
        "multimodal.processing",
        "placeholders are shortened",
        "PromptUpdate.modality",
        "PromptUpdate.resolve(item_idx)",
        "PromptReplacement.replacement",
        "PromptUpdateDetails.full",
        "PromptUpdateDetails.is_embed",
    ),
    *_reaches(
        "multimodal.processing.processor",
        "placeholders are shortened",
        "MultiModalProcessingResult.prompt_updates",
        "ResolvedPromptUpdate.content",
    ),
    *_reaches(
        "multimodal.inputs",
        "an image's fields go with it, and stay on the CPU",
        "MultiModalFieldConfig.batched(modality, keep_on_cpu)",
        "MultiModalFieldConfig.flat_from_sizes(modality, size_per_item, keep_on_cpu)",
        "MultiModalFieldConfig.field",
        "BaseMultiModalField.keep_on_cpu",
    ),
    *_reaches(
        "multimodal.inputs",
        "positions follow from where an image stands in the prompt",
        "MultiModalFeatureSpec.data",
        "MultiModalFeatureSpec.modality",
        "MultiModalFeatureSpec.mm_position",
        "PlaceholderRange.offset",
        "PlaceholderRange.length",
        "PlaceholderRange.is_embed",
    ),
    *_reaches("multimodal.parse", "embeddings in place of images are refused", "EmbeddingItems"),
    *_reaches("multimodal.parse", "a request's images are counted", "MultiModalDataItems.get_all_counts()"),
    *_reaches(
        "multimodal.registry",
        "a family's processor",
        "MultiModalRegistry.register_processor(processor, info, dummy_inputs)",
        "_ProcessorFactories.info",
        "_ProcessorFactories.processor",
        "_ProcessorFactories.dummy_inputs",
    ),
    *_reaches("multimodal", "a family's processor", "MULTIMODAL_REGISTRY"),
    *_reaches("transformers_utils.processor", "sizes of images", "cached_processor_from_config(model_config)"),
    *_reaches("platforms", "what is served depends on the device", "current_platform"),
    *_reaches("platforms.interface", "what is served depends on the device", "Platform.is_cpu()"),
    *_reaches(
        f"{_MODELS}.interfaces",
        "kept tokens keep their positions",
        "SupportsMRoPE.supports_mrope",
        ours=("SupportsMRoPE.get_mrope_input_positions(input_tokens, mm_features)",),
    ),
    *_reaches(f"{_MODELS}.interfaces", "a family's processor", "SupportsMultiModal._processor_factory"),
    *_reaches(
        f"{_MODELS}.interfaces", "words are embedded, tables lengthened", "SupportsMultiModal.get_language_model()"
    ),
    *_reaches(
        "model_executor.layers.rotary_embedding.base",
        "RoPE's tables reach the last position",
        "RotaryEmbeddingBase.cos_sin_cache",
        "RotaryEmbeddingBase._compute_cos_sin_cache()",
    ),
    *_reaches(
        "config.multimodal",
        "settings that a reducer does not go with are refused",
        "MultiModalConfig.is_multimodal_pruning_enabled()",
        "MultiModalConfig.mm_encoder_only",
        "MultiModalConfig.mm_encoder_tp_mode",
    ),
    *_reaches(
        "config.parallel",
        "settings that a reducer does not go with are refused",
        "ParallelConfig.use_ubatching",
        "ParallelConfig.pipeline_parallel_size",
    ),
    *_reaches("config.speculative", "settings that a reducer does not go with are refused", "SpeculativeConfig.method"),
    *_reaches("config.scheduler", "buffers of positions", "SchedulerConfig.max_num_batched_tokens"),
    *_reaches(
        "config",
        "the engine's settings",
        "VllmConfig.model_config",
        "ModelConfig.multimodal_config",
        "ModelConfig.hf_text_config",
        "ModelConfig.hf_config",
        "ModelConfig.max_model_len",
    ),
    *_reaches(
        "distributed",
        "heads on several devices choose as one",
        "tensor_model_parallel_all_gather(input_)",
        "tensor_model_parallel_all_reduce(input_)",
    ),
]

_IDEFICS = [
    *_SIGLIP,
    *_model(
        "idefics3",
        "Idefics3ForConditionalGeneration",
        "Idefics3ProcessingInfo.get_num_image_tokens(image_width, image_height, processor, mm_kwargs)",
        graphs=True,
    ),
]

PARTS: dict[str, list[Reach]] = {
    "": _SERVED,
    "llava": [
        *_CLIP,
        *_model("llava", "LlavaForConditionalGeneration", "LlavaForConditionalGeneration.vision_tower"),
        *_reaches(
            f"{_MODELS}.llava",
            "tokens are reduced before the projector or after it",
            "LlavaForConditionalGeneration._process_image_pixels(inputs)",
            "LlavaForConditionalGeneration.multi_modal_projector",
            "LlavaMultiModalProcessor",
            "LlavaDummyInputsBuilder",
        ),
        *_reaches(
            f"{_MODELS}.llava",
            "placeholders in the prompt are those of the tokens that are left",
            ours=("LlavaProcessingInfo.get_num_image_tokens(image_width, image_height)",),
        ),
    ],
    "llava-next": [
        *_model("llava_next", "LlavaNextForConditionalGeneration"),
        *_reaches(
            f"{_MODELS}.llava_next",
            "placeholders in the prompt are those of the tokens that are left",
            ours=("LlavaNextProcessingInfo.get_num_image_tokens(image_width, image_height)",),
        ),
    ],
    "llava-onevision": [
        *_model("llava_onevision", "LlavaOnevisionForConditionalGeneration"),
        *_reaches("multimodal.parse", "the largest image", "ImageSize"),
        *_reaches(
            f"{_MODELS}.llava_onevision",
            "tokens are reduced after the projector",
            ours=(
                "LlavaOnevisionForConditionalGeneration._process_video_pixels(inputs)",
                "LlavaOnevisionProcessingInfo.get_num_video_tokens(image_width, image_height, num_frames)",
                "LlavaOnevisionProcessingInfo.get_num_frames_with_most_features(seq_len, mm_counts)",
                "LlavaOnevisionProcessingInfo.get_image_size_with_most_features()",
                "LlavaOnevisionProcessingInfo.get_supported_mm_limits()",
            ),
        ),
    ],
    "internvl": [
        *_attention(
            "interns1_vit", "InternSdpaAttention", "InternS1VisionLayer.attention InternS1VisionLayer.layernorm_after"
        ),
        *_model(
            "interns1",
            "InternS1ForConditionalGeneration",
            "InternS1ForConditionalGeneration.video_context_token_id",
            "InternS1MultiModalProcessor",
            "InternS1ProcessingInfo.get_max_image_tokens()",
            images="_process_vision_input(image_input)",
        ),
        *_reaches(
            f"{_MODELS}.interns1",
            "tokens are reduced after the projector",
            ours=(
                "InternS1ProcessingInfo.get_num_frames_with_most_features(seq_len, mm_counts)",
                "InternS1ProcessingInfo.get_supported_mm_limits()",
            ),
        ),
    ],
    "idefics3": _IDEFICS,
    "smolvlm": [
        *_IDEFICS,
        *_reaches(f"{_MODELS}.smolvlm", "what the family is made of", "SmolVLMForConditionalGeneration"),
    ],
    "qwen2-vl": _qwen("qwen2_vl", "Qwen2VL"),
    "qwen2-5-vl": _qwen("qwen2_5_vl", "Qwen2_5_VL"),
    "qwen3-vl": _QWEN3,
    "qwen3-vl-moe": [
        *_QWEN3,
        *_model("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    ],
    "qwen3-5": [*_QWEN3, *_model("qwen3_5", "Qwen3_5ForConditionalGeneration")],
    "qwen3-5-moe": [*_QWEN3, *_model("qwen3_5", "Qwen3_5MoeForConditionalGeneration")],
    "glm4v": _GLM,
    "glm4v-moe": [*_GLM, *_model("glm4_1v", "Glm4vMoeForConditionalGeneration")],
    "glm-ocr": [*_GLM, *_model("glm_ocr", "GlmOcrForConditionalGeneration")],
    "paddleocr-vl": [
        *_reaches(
            f"{_MODELS}.paddleocr_vl",
            "placeholders in the prompt are those of the tokens that are left",
            ours=(
                "PaddleOCRVLProcessingInfo.get_supported_mm_limits()",
                "PaddleOCRVLMultiModalProcessor._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)",
            ),
        ),
        *_model("paddleocr_vl", "PaddleOCRVLForConditionalGeneration", adapters=False),
    ],
    "exaone4-5": [
        *_QWEN,
        *_reaches(
            f"{_MODELS}.exaone4_5",
            "placeholders in the prompt are those of the tokens that are left",
            ours=(
                "Exaone4_5_MultiModalProcessor._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)",
            ),
        ),
        *_model("exaone4_5", "Exaone4_5_ForConditionalGeneration", graphs=True),
    ],
    "cohere2-vision": [
        *_model("cohere2_vision", "Cohere2VisionForConditionalGeneration", adapters=False),
    ],
    "EAGLE drafts in the first model runner": [
        *_reaches(
            "v1.worker.gpu_model_runner",
            "its proposer is replaced, and asks it for requests",
            "EagleProposer(vllm_config, device, runner)",
            "GPUModelRunner.input_batch",
            "GPUModelRunner.requests",
        ),
        *_reaches(
            "v1.worker.gpu_input_batch",
            "which tokens of a request this step has",
            "InputBatch.req_ids",
            "CachedRequestState.get_token_id(idx)",
            "CachedRequestState.num_computed_tokens",
            "CachedRequestState.num_prompt_tokens",
        ),
        *_reaches(
            "v1.spec_decode.eagle",
            "the draft's rows and slots",
            "EagleProposer._get_positions(num_tokens)",
            *(f"EagleProposer.{name}" for name in ("input_ids", "uses_mrope", "max_model_len")),
            ours=(
                "EagleProposer.set_inputs_first_pass(target_token_ids, next_token_ids, target_positions, target_hidden_states, "
                "token_indices_to_sample, cad, num_rejected_tokens_gpu)",
                "EagleProposer._update_positions_dependent_metadata(positions, common_attn_metadata, batch_size, "
                "input_batch_size, block_size)",
            ),
        ),
        *_reaches(
            "v1.attention.backend",
            "which rows of a step are of which request, and where its next key goes",
            "CommonAttentionMetadata.query_start_loc_cpu",
            "CommonAttentionMetadata.seq_lens",
        ),
    ],
    "the number of threads after n-grams": _reaches("v1.spec_decode.ngram_proposer", "numba's pool", "get_num_threads"),
    "LLaVA-OneVision's videos of different lengths": _reaches(
        f"{_MODELS}.llava_onevision",
        "rows of each video",
        "LlavaOnevisionForConditionalGeneration._process_video_pixels(inputs)",
    ),
    "EXAONE 4.5's images": _reaches(
        "model_executor.layers.fusion.mm_input_norm", "what normalizes pixels", "build_mm_input_norm"
    ),
    "RoPE of LFM2 on CPUs": _reaches(
        "model_executor.layers.rotary_embedding.base",
        "heads are joined for its kernel",
        ours=("RotaryEmbedding.forward_cpu(positions, query, key)",),
    ),
    "bad images of requests": [
        *_reaches(
            "multimodal.media.connector",
            "what loads an image",
            "MediaConnector._load_data_url(url, media_io)",
            "MediaConnector._load_file_url(url_spec, media_io)",
        ),
        *_reaches("multimodal.media.image", "what decodes an image", "ImageMediaIO.load_bytes(data)"),
        *_reaches("exceptions", "an error of status 400", "VLLMValidationError"),
    ],
    "4-bit weights on CPUs without AVX-512": [
        *_reaches(
            f"{_LINEAR}.mixed_precision.cpu",
            "its reading of a checkpoint, and its product",
            ours=(
                "CPUWNA16LinearKernel.process_weights_after_loading(layer)",
                "CPUWNA16LinearKernel.apply_weights(layer, x, bias)",
            ),
        ),
        *_reaches(
            f"{_LINEAR}.mixed_precision.cpu",
            "where it keeps codes and scales",
            "CPUWNA16LinearKernel._get_weight_params(layer)",
            "CPUWNA16LinearKernel.w_q_name",
        ),
        *_reaches(
            "model_executor.layers.quantization.utils.quant_utils",
            "codes are unpacked",
            "unpack_quantized_values_into_int32(w_q, wtype, packed_dim)",
        ),
        *_reaches("logger", "it is said once", "init_logger(name)"),
        *_reaches("platforms", "which processor this is", "CpuArchEnum"),
    ],
    "quantized embeddings on CPUs": [
        *_reaches(
            f"{_COMPRESSED}.compressed_tensors_embedding",
            "rows are looked up without Triton",
            ours=("_dequant_gather_triton(ids, weight_packed, weight_scale, hidden, num_bits)",),
        ),
        *_reaches("triton_utils", "rows are looked up without Triton", "HAS_TRITON"),
    ],
    "FP8 on CPUs with AMX": [
        *_reaches(_LINEAR, "kernels are registered", "register_linear_kernel(kernel_class, platform, kernel_type)"),
        *_reaches("platforms", "kernels are registered", "PlatformEnum"),
        *_reaches("logger", "it is said once", "init_logger(name)"),
        *_reaches(
            f"{_LINEAR}.scaled_mm.pytorch",
            "the form of a kernel",
            ours=(
                "TorchFP8ScaledMMLinearKernel.can_implement(c)",
                "TorchFP8ScaledMMLinearKernel.get_output_padding()",
                "TorchFP8ScaledMMLinearKernel.process_weights_after_loading(layer)",
                "TorchFP8ScaledMMLinearKernel.apply_scaled_mm(A, B, out_dtype, As, Bs, bias, output_shape)",
            ),
        ),
        *_reaches(
            f"{_LINEAR}.scaled_mm.pytorch",
            "what it takes the place of",
            "TorchFP8ScaledMMLinearKernel.layer_param_names",
            "PerTensorTorchFP8ScaledMMLinearKernel",
            "ChannelWiseTorchFP8ScaledMMLinearKernel",
        ),
    ],
}


def problems(part: str, folder: Path) -> list[str]:
    """What is missing for a part in the vLLM whose package is in `folder`, one line each."""
    source = _source(folder)
    return [problem for reach in PARTS[part] if (problem := reach.problem(source))]


def broken(*parts: str) -> str | None:
    """The first thing that is missing for some parts in the imported vLLM, in one line; None for versions in `TESTED`."""
    import vllm

    if numbers(vllm.__version__) in TESTED:
        return None
    folder = Path(str(vllm.__file__)).parent
    return next((problem for part in parts for problem in problems(part, folder)), None)


def left_out(part: str) -> bool:
    """Whether a part does not work in the imported vLLM, which is then logged."""
    import vllm
    from vllm.logger import init_logger

    problem = broken(part)
    if problem:
        init_logger("vllm.vlmcompress").warning_once(
            "vlmcompress's plugin leaves out %s: in vLLM %s %s", part, vllm.__version__, problem
        )
    return problem is not None


def numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; empty if it has none (custom builds)."""
    parts = version.split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def tested(versions: Iterable[tuple[int, ...]] = TESTED) -> str:
    """Versions as text: `0.32 and 0.33`."""
    return " and ".join(".".join(map(str, version)) for version in versions)


@functools.cache
def _source(folder: Path) -> Source:
    return Source(folder)
