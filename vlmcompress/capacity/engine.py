"""What vLLM 0.32 does unless told otherwise, as far as memory and batches depend on it.

Sources: vLLM 0.32 `config/cache.py` (`gpu_memory_utilization`, `DEFAULT_BLOCK_SIZE`), `engine/arg_utils.py`
(`get_batch_defaults` of the OpenAI server), `platforms/cpu.py` (blocks of 128, one batch at once), `config/vllm.py`
(`max_concurrent_batches`: two on a GPU, where scheduling is asynchronous), `config/scheduler.py` (the encoder's cache holds as
many embeddings as a batch has tokens, or one image where that is more).
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcompress.targets import Target

GIB = 2**30


@dataclass(frozen=True)
class Defaults:
    """vLLM's defaults on a machine.

    Attributes:
        block: tokens of a block; `kernel`: what its size is a multiple of.
        batched: the most tokens of a step (`--max-num-batched-tokens`).
        sequences: the most sequences of a step (`--max-num-seqs`).
        batches: steps under way at once.
    """

    block: int = 16
    kernel: int = 16
    batched: int = 2048
    sequences: int = 256
    batches: int = 2

    def in_flight(self, length: int) -> int:
        """Tokens that are scheduled and not yet settled, at most, where sequences have up to `length` tokens."""
        return self.batches * min(self.batched, self.sequences * length)


def defaults(target: Target | None, memory: float | None = None) -> Defaults:
    """vLLM's defaults on a target. `memory`: bytes of a device; None: the target's."""
    if target and target.is_cpu:
        return Defaults(block=128, kernel=32, batched=2048, sequences=128, batches=1)
    size = memory if memory is not None else (target.memory or 0) * 1e9 if target else 0
    # 80 GB as sold are 79 to 80 GiB, and vLLM's limits are 70 and 160 GiB: figures as sold fall on the same side.
    if size >= 160 * GIB:
        return Defaults(batched=16384, sequences=1024)
    if size >= 70 * GIB and target and not target.title.startswith("A100"):
        return Defaults(batched=8192, sequences=1024)
    return Defaults()


def encoder_embeddings(defaults: Defaults, largest: int) -> int:
    """Embeddings that the encoder's cache holds, where one image or video has up to `largest`."""
    return max(defaults.batched, largest)
