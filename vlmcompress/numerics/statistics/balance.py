"""Balances: the weight of each modality in a method's objective.

When all `N` tokens are pooled, each modality is weighted by its number of tokens, and most tokens are visual. A *balance*
instead gives modality m, of `n_m` tokens, the share `p_m` of the total (`sum p_m = 1`); `GroupStats` describes how that
changes Gram matrices, means and maxima. A balance is one of

* `off`: every token counts the same.
* `ratio`: each modality's own mean counts the same, `p_m = 1/3`.
* `{text: w, vision: w, answer: w}`: `p_m ~ w_m`, weights of the modalities' means.
* `mbq`: the squared-error form of MBQ's objective (arXiv 2412.19509), `mean_answer(D^2) + rho mean_vision(D^2)`, that is
  `{text: 0, vision: rho, answer: 1}` with `rho`, block by block, from the ratio of the modalities' mean loss gradients.

An answer's tokens are those that predict it, starting with the prompt's last token (`models.data.encode`). The authors of MBQ
count the predicted tokens instead. For captions of a hundred words the difference is small. For answers of a word or two their
choice leaves out the token whose logits give the answer, and counts the token that ends it, whose logits are not used: on the
demo models `mbq` then raised GPTQ's logit error, up to twofold.

`mbq` needs a backward pass over the calibration samples, whose result is a `Sensitivity`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODALITIES = ("text", "vision", "answer")
"""Names of the modalities; a mask holds 0 for tokens to ignore and `1 + index` for these."""

NAMES = ("off", "ratio", "mbq")


@dataclass(frozen=True)
class Sensitivity:
    """How much the answer's loss L depends on the output Y of a group of linear layers.

    Attributes:
        rho: MBQ's weight of visual tokens next to the answer's, `max(r_l, median_l r_l)` of `r = g_vision / g_answer`.
    """

    rho: float


def require_balance(balance: Any) -> str | dict[str, float]:
    """Check a recipe's `balance`, a name or weights, and return it, or raise ValueError. YAML reads "off" as False: both
    work."""
    if balance is False:
        return "off"
    if isinstance(balance, str) and balance in NAMES:
        return balance
    if not isinstance(balance, Mapping):
        raise ValueError(f"balance must be {', '.join(NAMES)} or {{text: w, vision: w, answer: w}}, got {balance!r}")
    if set(balance) != set(MODALITIES):
        raise ValueError(
            f"balance must give weights of {', '.join(MODALITIES)}, got {', '.join(map(str, balance)) or 'none'}"
        )
    for name, weight in balance.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight < 0:
            raise ValueError(f"balance must give {name} a number of at least 0, got {weight!r}")
    if not any(balance.values()):
        raise ValueError("balance must give one modality a weight above 0, got 0 for all")
    return {name: float(balance[name]) for name in MODALITIES}


def weighed(balance: Any) -> tuple[str, ...]:
    """The modalities that must occur in the calibration data for this balance."""
    checked = require_balance(balance)
    if isinstance(checked, str):
        return {"off": (), "ratio": MODALITIES}.get(checked, ("vision", "answer"))
    return tuple(name for name, weight in checked.items() if weight > 0)


def shares(
    balance: Any, count: Mapping[str, int], sensitivity: Sensitivity | None, partial: bool = False
) -> dict[str, float] | None:
    """The share `p_m` of each modality under a balance; None where all tokens are pooled.

    Args:
        count: modality -> its number of tokens.
        sensitivity: sensitivity of the group of layers whose statistics are balanced; needed for `mbq` only.
        partial: for an expert, which may see tokens of one modality only, or none that the loss depends on: use the
            modalities
            that occurred, and pool where that is impossible.

    Raises:
        ValueError: a modality with a share did not occur, or `mbq` has no sensitivity.
    """
    checked = require_balance(balance)
    if checked == "off":
        return None
    needed = weighed(checked)
    missing = [name for name in needed if not count[name]]
    if missing and not partial:
        raise ValueError(f"balance needs {' and '.join(missing)} tokens, and none reached this layer")
    if isinstance(checked, dict):
        weights = checked
    elif checked == "ratio":
        weights = dict.fromkeys(MODALITIES, 1.0)
    elif sensitivity is None:
        raise ValueError(f"balance '{checked}' needs the gradients of a sensitivity pass")
    else:
        weights = {"vision": sensitivity.rho, "answer": 1.0}
    weights = {name: weight for name, weight in weights.items() if name not in missing}
    total = sum(weights.values())
    if not 0 < total < math.inf:
        if partial:
            return None
        raise ValueError("the loss does not depend on this layer: all gradients are zero or not finite")
    return {name: weight / total for name, weight in weights.items() if weight > 0}
