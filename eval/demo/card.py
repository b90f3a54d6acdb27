"""The model card of a demo model."""

from textwrap import dedent

ABOUT = {
    "qwen": (
        "Qwen2.5-VL (`Qwen2_5_VLForConditionalGeneration`): dynamic resolution, window attention, M-RoPE",
        "patches of 8 px merged 2x2, so 16x16 px a visual token; windows of 48 px; images of 96 to 192 px a side",
    ),
    "llava": (
        "LLaVA-1.5 (`LlavaForConditionalGeneration`): a CLIP tower, an MLP projector, a Llama language model",
        "images of 144x144 px, patches of 16 px, 81 visual tokens an image",
    ),
}


def _table(summary: dict) -> str:
    splits = [split for split in ("validation", "test") if split in summary]
    families = summary[splits[0]]["families"]
    lines = ["| family | " + " | ".join(splits) + " |", "|---" * (len(splits) + 1) + "|"]
    for family in families:
        lines.append(f"| {family} | " + " | ".join(f"{summary[s]['families'][family]:.1%}" for s in splits) + " |")
    overall = " | ".join(f"**{summary[s]['overall']:.1%}** of {summary[s]['rows']}" for s in splits)
    return "\n".join([*lines, f"| **overall** | {overall} |"])


def model_card(kind: str, summary: dict) -> str:
    """Render README.md of a checkpoint, from the training script's measurements."""
    architecture, pixels = ABOUT[kind]
    head = f"""\
        ---
        license: apache-2.0
        pipeline_tag: image-text-to-text
        tags: [vlmcompress, demo]
        ---
        # demo-{kind}

        A small vision-language model of a real architecture, {architecture}, trained from scratch for vlmcompress, so that
        compression can be tried and tested without a download. It knows one small drawn world and nothing else.

        - Size: {summary["parameters"] / 1e6:.2f} M parameters, stored in BF16. {pixels[0].upper() + pixels[1:]}.
        - Data: `eval/world`, a seeded generator: coloured shapes, handwritten digits (scikit-learn's copy of the UCI optical
          digits), rendered letters and bar charts on a grid, with questions and answers of one to five tokens. Train,
          calibration, validation and test splits share no seed and no handwritten digit.
        - Training: `scripts/train/train_demo_vlm.py --model {kind} --seed {summary["seed"]}`, {summary["steps"]} steps on one
          CPU core in {summary["train_minutes"]} minutes, in three stages: the language model on looked-up visual tokens, the
          tower towards those tokens, both end to end.
        HISTORY
        ## Accuracy
        Exact match of greedy answers, by this BF16 checkpoint in transformers:
        """
    tail = """\
        ## Limits
        Questions outside the world's wordings, other image styles and other languages get meaningless answers. It is a test
        object: nothing about large models follows from its accuracy alone. Within the text family, recalling one of three
        facts ("The box is red. ... What colour is the box?") was hardly learned: a quarter to a half right; guessing: a third.

        Licence: Apache-2.0.
        """
    head = dedent(head).replace("HISTORY\n", "".join(f"  {line}\n" for line in summary.get("history", [])) + "\n")
    return head + "\n" + _table(summary) + "\n\n" + dedent(tail)
