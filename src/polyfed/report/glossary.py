"""What stages are, and the columns of which no note below the table says it, for tooltips and for a list."""

from __future__ import annotations

from polyfed.results.main_score import ACCURACY, MainScore

_STAGES = {
    "received": "the model that a client would get from the server now",
    "after_training": "the model right after a client's local training, before the server has its say",
    "personal": "the model that a client keeps for itself",
}
_COLUMNS = {
    "std clients": "Standard deviation of the accuracy over clients, in %: how unequally well clients fare.",
    "best by valid.": "Test accuracy, in %, of the round with the best accuracy on validation data; the choice never "
    "looks at test data.",
    "lowest tenth": "Mean accuracy of the lowest tenth of the clients, in %.",
    "MAE": "Mean absolute error on test data, mean over clients, in the unit of the numbers.",
    "R2": "Coefficient of determination on test data, mean over clients: 1 is perfect, 0 as good as predicting the "
    "mean of a client's test data.",
    "balanced accuracy": "Mean, in %, of the recalls of the classes that a client has test samples of.",
    "macro F1": "Mean F1 of the classes that a client has test samples of, in %.",
    "macro AUC": "Mean area under the ROC curves, one class against the others, in %.",
    "calibration error": "Expected calibration error in %, over 15 bins: how far confidences are from the share of "
    "right answers; low is good.",
    "time": "Of one whole run on the machine that it ran on.",
    "simulated time": "That one whole run would have taken on the clients' simulated devices.",
    "refused": "Uploads that did not count, over all runs of the row: for example numbers that were not finite.",
    "best rival": "The best other row but Local.",
}


def about_column(heading: str, score: MainScore = ACCURACY) -> str:
    """What a column means; "" where that is not known. score: the main score."""
    if heading in _STAGES:
        return score.of_it(f"Accuracy in % of {_STAGES[heading]}.")
    if heading.startswith("by "):
        about = f"The same models in the same stage, predicting by {heading.removeprefix('by ')} instead"
        return f"{about}; in %." if score.is_share else f"{about}."
    return score.of_it(_COLUMNS.get(heading, ""))


def about_stage(stage: str) -> str:
    """What a stage of scoring is; "" where that is not known."""
    return f"{stage}: {_STAGES[stage]}" if stage in _STAGES else ""
