"""Attach visual-token reducers to transformers models.

    with attach(vlm, "dart", {"keep": 0.25}) as attached:
        vlm.model.generate(**inputs)
    attached.images()    # the reduction of each image

`reduction.methods` decides, this package applies, by hooks: whatever calls the model (`forward`, `generate`) gets the
reduced one until `detach`. The language model really gets fewer rows. Tokens that are kept stay where they were: positions
(1-D and M-RoPE), text after an image, and every generated token have the position that they have without a reducer.
Reducing to a selection is therefore the same as hiding the dropped tokens from attention, and is tested to be, where a decoder
is of attention alone. Others (`ModelSpec.mixed_blocks`) run on the shorter sequence, in which dropped tokens are absent: LFM2's
short convolutions take the tokens that are left for neighbours, the recurrent states of Qwen3.5's Gated DeltaNets take them up
one after the other. That is tested, too: with all tokens left at their old positions. In Gemma 3 what is left of an image sees
what is left of it in both directions.

Logits and hidden states have the reduced length. A batch is padded on the left, on the right if it was. Each image, or tile
where a family cuts images into tiles, is reduced on its own; videos are not. The caches hold what is kept, and a model
continues them only while the reducer that filled them is attached. Methods that look at the text see all of the prompt's
words: a prompt that holds an answer (teacher forcing, or generation without a cache) shows them the answer, too.
"""

from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks._attach import Attachment, KeptWhole
from vlmcompress.reduction.hooks.attaching import attach, attach_carried
from vlmcompress.reduction.hooks.units import Reduced

__all__ = ["Attachment", "ReducerChoice", "KeptWhole", "Reduced", "attach", "attach_carried"]
