"""What hookcb sees in each trainer: the table of docs/guide/loops.md; test_trainer_table.py checks its cells.

`python tests/interop/trainer_table.py` prints it as Markdown.
"""

COLUMNS = {
    "attach": "trainer",
    "events": "events",
    "scale": "gradients under a GradScaler",
    "clipping": "… and clipping",
    "epochs": "epochs",
    "loss": "loss",
    "validation": "validation",
    "stop": "a callback that ends the fit",
}

TOLD = "found; in validation `w.report_loss(loss)`"
EARLY = "after; before, with `w.begin_step(optimizer)` there"

# by the name of its function in trainers.py
TRAINERS = {
    "plain": {
        "attach": "your own loop: `watch`",
        "events": "all",
        "scale": "unscaled",
        "clipping": EARLY,
        "epochs": "`w.end_epoch()` at the end of each",
        "loss": TOLD,
        "validation": "calls in eval mode",
        "stop": "look at `w.stop_requested`",
    },
    "lightning": {
        "attach": "Lightning: `hookcb.adapters.lightning.HookcbCallback`",
        "events": "all; `after_pred` where `training_step` calls `self(x)`",
        "scale": "unscaled",
        "clipping": "before",
        "epochs": "yes",
        "loss": "yes",
        "validation": "yes, without the sanity check",
        "stop": "stops the trainer",
    },
    "transformers": {
        "attach": "Hugging Face Trainer: `hookcb.adapters.transformers.HookcbCallback`",
        "events": "all",
        "scale": "unscaled",
        "clipping": "after; `max_grad_norm=0` has none",
        "epochs": "yes",
        "loss": "that of the model's output",
        "validation": "yes",
        "stop": "stops the trainer",
    },
    "accelerate": {
        "attach": "Accelerate: `watch` on what `prepare` gave",
        "events": "all",
        "scale": "unscaled",
        "clipping": EARLY,
        "epochs": "`w.end_epoch()` at the end of each",
        "loss": TOLD,
        "validation": "calls in eval mode",
        "stop": "look at `w.stop_requested`",
    },
    "ignite": {
        "attach": "Ignite: `watch`",
        "events": "all",
        "scale": "unscaled",
        "clipping": EARLY,
        "epochs": "`w.end_epoch` as handler of `EPOCH_COMPLETED`",
        "loss": "found; in validation `w.report_loss(loss)` in the loss function",
        "validation": "calls in eval mode",
        "stop": "look at `w.stop_requested`",
    },
    "skorch": {
        "attach": "skorch: `watch` on `net.module_`, then `partial_fit`",
        "events": "all; LBFGS none of the step",
        "scale": "it has no GradScaler",
        "clipping": EARLY,
        "epochs": "`w.end_epoch()` in `on_epoch_end`",
        "loss": "found; in validation `w.report_loss(loss)` in `get_loss`",
        "validation": "calls in eval mode",
        "stop": "look at `w.stop_requested`",
    },
}


def markdown():
    """The table as Markdown."""
    rows = [COLUMNS, dict.fromkeys(COLUMNS, "---"), *TRAINERS.values()]
    return "\n".join(f"| {' | '.join(row[column] for column in COLUMNS)} |" for row in rows)


if __name__ == "__main__":
    print(markdown())  # noqa: T201  # a script
