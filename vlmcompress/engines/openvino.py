"""OpenVINO GenAI as an engine: its `VLMPipeline`, on a folder written by the format `openvino`.

`ENGINE` runs this file in a separate process (`engines/worker.py` loads it there). Prompts come from `rendered`. The pipeline
resizes images, with the one of its two implementations that filters like Pillow (`VISION_PREPROCESS=CPP`). The pipeline
chooses the precision, as for its users, unless float32 is requested: then neither inputs nor the cache are rounded.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from PIL import Image

from vlmcompress.engines.local import OFFLINE, Local
from vlmcompress.engines.rendered import Rendered, answers, description

__all__ = ["ENGINE", "PACKAGE", "answers", "start"]
PACKAGE = "openvino_genai"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "KV_CACHE_PRECISION": "f32"}
ENVIRONMENT = OFFLINE | {"VISION_PREPROCESS": "CPP"}
ENGINE = Local(
    name="openvino",
    title="OpenVINO",
    module=Path(__file__),
    environment=lambda: {**ENVIRONMENT, **os.environ},
    advice="pip install '.[openvino]' in the checkout of vlmcompress",
)


def start(job: dict):
    """Load the engine; return it with a description."""
    engine = Engine(job)
    return engine, description(engine, "openvino", "openvino-genai")


class Engine(Rendered):
    """A pipeline in this process."""

    def __init__(self, job: dict):
        import openvino_genai

        from vlmcompress.export.openvino import REGISTRY

        super().__init__(job, "openvino", REGISTRY, "openvino_language_model.xml")
        folder, settings = Path(job["model"]), job["settings"]
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if job.get("reduce") or "vlmcompress" in config:  # the block of a reducer
            raise ValueError("OpenVINO GenAI runs no reducer of visual tokens; use --engine hf, or resize images")
        positions, limit = config["text_config"].get("max_position_embeddings") or 8192, settings["max_model_len"]
        self.longest = min(positions, limit) if limit > 0 else positions
        # OpenVINO 2026.4.1 dies with SIGFPE when it compiles a bfloat16 matrix product for one thread (openvino #33300), and
        # has one thread for a process that is bound to one core, however many are asked for: there float32 is the way out.
        cores = len(os.sched_getaffinity(0))
        threads = max(2, int(os.environ.get("OMP_NUM_THREADS") or cores))
        options = {"INFERENCE_NUM_THREADS": threads} | (EXACT if settings["dtype"] == "float32" else {})
        if cores == 1:
            options |= {"INFERENCE_PRECISION_HINT": "f32"}
        self.pipeline = openvino_genai.VLMPipeline(folder, "CPU", **options)

    def answer(self, request: dict, settings: dict) -> dict:
        """Answer one request."""
        text, images = self.prompt(request["messages"])
        tag = self.family.tag or self.family.image
        prompt = text.replace(self.family.image + self.family.suffix, self.family.image).replace(self.family.image, tag)
        greedy = self._generate(prompt, images, request["max_tokens"] or settings["max_tokens"])
        if (length := greedy.perf_metrics.get_num_input_tokens()) >= self.longest:
            raise ValueError(f"the prompt has {length} tokens and the maximum context length is {self.longest}")
        first = None
        if most := settings["logprobs"]:  # beams of one step are the most likely tokens, with their log-probabilities
            beams = self._generate(prompt, images, 1, num_beams=most, num_return_sequences=most, length_penalty=0.0)
            first = [[text, score] for text, score in zip(beams.texts, beams.scores, strict=True)]
        return {
            "text": greedy.texts[0],
            "finish": "length" if greedy.finish_reasons[0].name == "LENGTH" else "stop",
            "prompt_tokens": length,
            "output_tokens": greedy.perf_metrics.get_num_generated_tokens(),
            "first": first,
        }

    def _generate(self, prompt: str, images: list, max_tokens: int, **options):
        from openvino_genai import GenerationConfig

        # Options would only modify the folder's generation config, which may sample or penalize repetitions. A new config
        # replaces it, and has to name the end tokens.
        config = GenerationConfig()
        ends = {*self.pipeline.get_generation_config().stop_token_ids, self.pipeline.get_tokenizer().get_eos_token_id()}
        options |= {"stop_token_ids": ends, "apply_chat_template": False}
        config.update_generation_config(max_new_tokens=max_tokens, **options)
        return self.pipeline.generate(prompt, images=images, generation_config=config)

    def encode_image(self, picture: Image.Image) -> Any:
        """An image in the pipeline's form, bytes `[height, width, 3]`."""
        import numpy as np
        import openvino

        return openvino.Tensor(np.array(picture)[None])
