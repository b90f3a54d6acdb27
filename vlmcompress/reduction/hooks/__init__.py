"""Attach visual-token reducers to transformers models.

    with attach(vlm, "dart", {"keep": 0.25}) as attached:
        vlm.model.generate(**inputs)
    attached.images()    # the reduction of each image

`reduction.methods` decides, this package applies, by hooks: whatever calls the model (`forward`, `generate`) gets the
reduced one until `detach`. The language model really gets fewer rows. Tokens that are kept stay where they were: positions
(1-D and M-RoPE), text after an image, and every generated token have the position that they have without a reducer.
Reducing to a selection is therefore the same as hiding the dropped tokens from attention, and is tested to be, for decoders
with attention only. Others (`ModelSpec.mixed_blocks`) run on the shorter sequence, without dropped tokens: LFM2's short
convolutions treat the remaining tokens as adjacent, and the recurrent states of Qwen3.5's Gated DeltaNets read them one after
the other. That is tested as well. In Gemma 3 the remaining tokens of an image attend to each other in both directions.

Logits and hidden states have the reduced length. A batch is padded on the left, or on the right if its input was. Each image
(each tile in families that tile images) is reduced on its own; videos are not reduced. Caches hold the kept tokens, and can be
continued only while the reducer that filled them is attached. Methods within the language model see all words of the prompt: if
it includes an answer (teacher forcing, or generation without a cache) they see the answer as well.
"""

from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks._attach import Attachment, KeptWhole
from vlmcompress.reduction.hooks.attaching import attach, attach_carried
from vlmcompress.reduction.hooks.units import Reduced

__all__ = ["Attachment", "ReducerChoice", "KeptWhole", "Reduced", "attach", "attach_carried"]
