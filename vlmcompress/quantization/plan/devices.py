"""Whether vLLM can serve what a recipe gives on several devices that share the model (tensor parallelism)."""

from __future__ import annotations

from vlmcompress.engines.vllm import partition, served_model
from vlmcompress.engines.vllm.partition import FusedLayer
from vlmcompress.quantization.plan.survey import Survey


def quantized_decoder_layers(survey: Survey) -> list[FusedLayer]:
    """The decoder's quantized layers, those of equal shapes and formats once."""
    return partition.fused_layers(survey.source.meta_model, survey.groups, survey.schemes)


def devices_problem(survey: Survey, devices: int) -> str | None:
    """Why vLLM cannot share the model out among `devices`, and what to do; None where it can."""
    decoder = served_model.describe(survey.source.meta_model)
    torn = served_model.tp_problem_message(decoder, devices) or partition.partition_problem(
        quantized_decoder_layers(survey), devices, survey.recipe.target
    )
    if torn:
        return torn
    torn = partition.tower_problem(survey.source.meta_model, survey.source.spec, survey.schemes, devices)
    return (
        f"{torn}; use fewer, or serve with --mm-encoder-tp-mode data, which gives each the whole tower"
        if torn
        else None
    )


def launch_device_counts(survey: Survey) -> list[int]:
    """Numbers of devices, of those that launch files choose from, that the decoder's layers can be split among."""
    decoder = served_model.describe(survey.source.meta_model)
    whole = partition.device_counts(quantized_decoder_layers(survey))
    return [devices for devices in whole if served_model.tp_problem(decoder, devices) is None]
