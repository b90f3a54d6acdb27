"""Let the CUDA build of torchvision import next to a CPU build of torch.

PyPI carries only the CUDA build of torchvision. Next to a CPU torch its compiled operators do not load, and
`import torchvision` dies with "operator torchvision::nms does not exist", although vLLM and transformers use nothing but
its Python transforms. `scripts/setup` copies this file into the environment together with a `.pth` file that imports it,
so that every process (vLLM starts several) installs the hook below before anything imports torchvision.

The hook declares the two missing operator schemas. It does nothing when torchvision's own operators load.
"""

import importlib.abc
import importlib.util
import pathlib
import sys


class _TorchvisionHook(importlib.abc.MetaPathFinder):
    """An import hook that runs once, just before the first `import torchvision`, and then does nothing."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torchvision")
        if spec is not None and spec.origin:
            _declare_missing_operators(pathlib.Path(spec.origin).parent)
        return spec


def _declare_missing_operators(package: pathlib.Path) -> None:
    import torch

    if torch.version.cuda is not None:
        return
    for library in package.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
            return
        except OSError:
            pass
    fragment = torch.library.Library("torchvision", "FRAGMENT")
    fragment.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    fragment.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch._vlmcompress_torchvision_fragment = fragment  # a Library undoes its definitions when collected


sys.meta_path.insert(0, _TorchvisionHook())
