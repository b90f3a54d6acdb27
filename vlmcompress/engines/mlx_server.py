"""mlx-vlm's server with a checkpoint's reducer: `python mlx_server.py --model FOLDER FLAGS...`, run by path.

It replaces two functions in `server/generation.py` of mlx-vlm 0.7.10: `load`, for the model, and
`ResponseGenerator._gpu_embed`, which pairs a prompt's tokens with its embeddings, for the tokens.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Serve until a signal ends this process."""
    import mlx.core as mx
    from mlx_vlm.server import generation
    from mlx_vlm.server import main as serve

    reducers = runpy.run_path(str(Path(__file__).with_name("mlx_reducers.py")))
    load, embed = generation.load, generation.ResponseGenerator._gpu_embed

    def load_reduced(path, *arguments, **options):
        model, processor = load(path, *arguments, **options)
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        reducers["attach"](model, config)
        return model, processor

    def embed_reduced(self, *arguments, **options):
        tokens, rest = embed(self, *arguments, **options)
        stayed = getattr(self.model, "stayed", None)
        return (tokens if stayed is None else tokens[:, mx.array(stayed)]), rest

    generation.load, generation.ResponseGenerator._gpu_embed = load_reduced, embed_reduced
    serve()


if __name__ == "__main__":
    # our modules must not shadow others
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]
    main()
