"""`python -m controller.telemetry.mlflow_process`: writes rows to one run of MLflow.

After a resume the MLflow run is found by a tag. Input and output are handled in tracker_process.py. Uses only the
documented interface of MlflowClient (2.x and 3.x). Tests use a module that records calls; run with 3.17.2 once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.telemetry.tracker_process import flat, place_of, run_process

RUN_TAG, NOTE_TAG = "areal_like.run_id", "mlflow.note.content"
MAX_PARAMS, MAX_CHARS = 100, 500
"""Parameters per request, and characters per value: the limits of MLflow's servers."""


class MlflowRun:
    """See Tracker."""

    def __init__(self, client: Any, run_id: str, make_metric: Any) -> None:
        self._client, self._run_id, self._make_metric = client, run_id, make_metric

    def log(self, row: Mapping[str, Any]) -> None:
        """See Tracker."""
        place, milliseconds = place_of(row), int(row["_timestamp"] * 1000)
        names = [name for name in row if "/" in name]
        metrics = [self._make_metric(name, float(row[name]), milliseconds, place) for name in names]
        self._client.log_batch(self._run_id, metrics=metrics)

    def table(self, table: Mapping[str, Any]) -> None:
        """See Tracker. MLflow appends to an existing table."""
        columns = {name: [line[at] for line in table["data"]] for at, name in enumerate(table["columns"])}
        self._client.log_table(self._run_id, data=columns, artifact_file=f"{table['name']}.json")

    def finish(self) -> None:
        """See Tracker."""
        self._client.set_terminated(self._run_id)


def begin(start: dict[str, Any]) -> MlflowRun:
    """Find the run of MLflow, or create it."""
    import mlflow
    from mlflow.entities import Metric, Param

    client = mlflow.MlflowClient(tracking_uri=start["uri"])
    experiment = client.get_experiment_by_name(start["experiment"])
    if experiment is None:
        place = {"artifact_location": start["artifacts"]} if start["artifacts"] else {}
        experiment_id = client.create_experiment(start["experiment"], **place)
    else:
        experiment_id = experiment.experiment_id
    found = client.search_runs([experiment_id], filter_string=f"tags.`{RUN_TAG}` = '{start['id']}'")
    if found:
        return MlflowRun(client, found[0].info.run_id, Metric)
    tags = {RUN_TAG: start["id"], **{tag[:MAX_CHARS]: "true" for tag in start["tags"]}}
    tags |= {NOTE_TAG: start["notes"]} if start["notes"] else {}
    run_id = client.create_run(experiment_id, tags=tags, run_name=start["name"]).info.run_id
    params = [Param(key, str(value)[:MAX_CHARS]) for key, value in flat(start["config"])]
    for first in range(0, len(params), MAX_PARAMS):
        client.log_batch(run_id, params=params[first : first + MAX_PARAMS])
    return MlflowRun(client, run_id, Metric)


if __name__ == "__main__":
    run_process(begin)
