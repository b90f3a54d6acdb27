"""Model types of vision-language models that were looked at and are not supported, each with the reason, as data.

What is said of releases holds for transformers 5.17 and vLLM 0.32.
"""

from __future__ import annotations

UNSUPPORTED: dict[str, str] = {
    "gemma4_unified": "it has no vision tower that could be kept apart: raw patches go into the decoder",
    "glm46v": "vLLM 0.32 has no class for it; GLM-4.6V-Flash is published as model type 'glm4v', which is supported",
    "glm4v_moe": "its experts are not described yet; of GLM-4.6V take the dense 'Flash', of the model type 'glm4v'",
    "internvl_chat": "its model is Python code in the checkpoint; take the same model's '-HF', of the type 'internvl'",
    "minicpmo": "its model is Python code in the checkpoint, and transformers has no class for it",
    "minicpmv": "its model is Python code in the checkpoint; transformers has a class from MiniCPM-V 4.6 on",
    "minicpmv4_6": "transformers 5.17 runs its tower only on tiles of one size, which an image and its tiles seldom have",
}
"""Model type -> why it is not supported, and what to take instead where there is something."""
