"""What a recipe's rotation means for a plan: whether it leaves the model as it is, and what the rotated model looks like."""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.checkpoint import rotate
from vlmcompress.errors import UserError
from vlmcompress.models import Source, stream
from vlmcompress.recipe import Recipe


def problems(recipe: Recipe, source: Source) -> list[str]:
    """Why a recipe cannot rotate this model, a line each.

    Args:
        source: the model, or what a rotation made of it.
    """
    if recipe.rotate is None:
        return []
    if recipe.reduce is not None and recipe.reduce.options.by_channel:
        return [
            f"reduce {recipe.reduce}: it ranks visual tokens by single channels, so that with --rotate it would keep "
            "others; take another, such as divprune, or leave out --rotate"
        ]
    try:
        stream(source.meta_model, source.spec, source.stored)
    except UserError as error:
        return [str(error)]
    return []


def outlined(recipe: Recipe, source: Source) -> Source:
    """The model that is quantized, as far as headers tell: with an output head of its own where it is rotated.

    Args:
        source: the model; one that is rotated already, or can't be, is given back.
    """
    if recipe.rotate is None or problems(recipe, source):
        return source
    stored, names = rotate.outline(source)
    return replace(source, stored=stored, names=names)
