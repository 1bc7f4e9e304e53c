"""What the columns of tables mean, in a sentence each, for tooltips and for a list below the tables."""

from __future__ import annotations

from polyfed.results.main_score import ACCURACY, MainScore

__all__ = ["about_column", "about_stage"]

_STAGES = {
    "received": "the model that a client would get from the server now",
    "after_training": "the model right after a client's local training, before the server has its say",
    "personal": "the model that a client keeps for itself",
}
_POINTS = "in percentage points, paired by seed"
_COLUMNS = {
    "method": "A method or a variant of one; all rows have the same data, clients and rounds.",
    "stage": "Which of a client's models is scored; each method in the stage that its paper scores.",
    "seeds": "The seeds that the row is a mean over.",
    "accuracy": "Share of right answers on test data in %, after the last round: the mean over clients, then over "
    "seeds. ± is the sample standard deviation over seeds.",
    "vs Local": f"Accuracy minus that of Local, whose clients train alone; {_POINTS}.",
    "std clients": "Standard deviation of the accuracy over clients, in %: how unequally well clients fare.",
    "min client": "Accuracy of the worst client, in %; mean over seeds.",
    "best by valid.": "Test accuracy, in %, of the round with the best accuracy on validation data; the choice never "
    "looks at test data.",
    "lowest tenth": "Mean accuracy of the lowest tenth of the clients, in %.",
    "RMSE": "Root of the mean squared error on test data, in the unit of the numbers that are predicted, after the "
    "last round: the mean over clients, then over seeds; low is good. ± is the sample standard deviation over seeds.",
    "R2": "Coefficient of determination on test data, mean over clients: 1 is perfect, 0 as good as predicting the "
    "mean of a client's test data.",
    "max client": "RMSE of the worst client; mean over seeds.",
    "highest tenth": "Mean RMSE of the highest tenth of the clients.",
    "balanced accuracy": "Mean, in %, of the recalls of the classes that a client has test samples of.",
    "macro F1": "Mean F1 of the classes that a client has test samples of, in %.",
    "macro AUC": "Mean area under the ROC curves, one class against the others, in %.",
    "calibration error": "Expected calibration error in %, over 15 bins: how far confidences are from the share of "
    "right answers; low is good.",
    "own classes": "Accuracy in % on the classes that each client has training samples of.",
    "missing classes": "Accuracy in % on the classes that a client has no training samples of, on the test samples of "
    "all clients.",
    "held out, received": "Accuracy in % of clients that never trained, each with what it would receive if it joined "
    "now.",
    "held out, trained": "Accuracy in % of clients that never trained, after local training on what they would "
    "receive.",
    "epsilon client": "Privacy spent, for whether a client takes part: the largest over clients and runs.",
    "epsilon sample": "Privacy spent, for what one of a client's rows holds: the largest over clients and runs.",
    "bytes up": "Sent from all clients to the server in one whole run.",
    "bytes down": "Sent from the server to all clients in one whole run.",
    "time": "Of one whole run on the machine that it ran on.",
    "simulated time": "That one whole run would have taken on the clients' simulated devices.",
    "refused": "Uploads that did not count, over all runs of the row: for example numbers that were not finite.",
    "minus Local": f"95 % interval of the difference to Local, {_POINTS}.",
    "best rival": "The best other row but Local.",
    "minus rival": f"Accuracy minus that of the best rival, {_POINTS}.",
    "interval": f"95 % interval of the difference to the best rival, {_POINTS}.",
    "gain over Local": f"Accuracy minus that of Local, {_POINTS}: gain alone + federated gain.",
    "gain alone": "What the method gains over Local where every client is a federation of its own, so that nobody "
    f"hears of anybody; {_POINTS}.",
    "federated gain": f"Accuracy with the other clients minus accuracy alone; {_POINTS}.",
    "interval of gain": f"95 % interval of the gain over Local, {_POINTS}.",
    "interval alone": f"95 % interval of the gain alone, {_POINTS}.",
    "interval federated": f"95 % interval of the federated gain, {_POINTS}.",
    "minus Local of its steps": f"Accuracy minus that of a Local that takes as many steps, {_POINTS}.",
    "way to pooled": "The gain over Local as a share of what training on the rows of all clients gains.",
    "seeds that reached it": "In how many of the runs the target was reached.",
    "below it again": "In how many of these a later round was below the target again.",
    "rounds": "The first round at or above the target, counted from 1.",
    "bytes": "Sent both ways up to the end of that round.",
    "ours": "Measured here, after the last round.",
    "paper": "As printed; numbers in brackets are footnotes.",
    "difference": "Ours minus the paper's.",
    "mark": "What stands in the way of the comparison, or that the difference is more than three spreads.",
    "dropped out": "Clients that were asked and dropped out, over all rounds and seeds.",
    "late": "Uploads that did not arrive in their round, over all rounds and seeds.",
    "discarded": "Late uploads that were overtaken or came too late, over all rounds and seeds.",
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
