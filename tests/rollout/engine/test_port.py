"""What a request, an outcome and a report say where nothing else is given."""

from __future__ import annotations

import numpy as np

from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout.engine.port import EngineCapabilities, GenerationOutcome, GenerationRequest, LoadReport


def test_a_request_by_itself_is_never_cut_and_shares_and_keeps_nothing() -> None:
    request = GenerationRequest(
        request_id=1, prompt_P=np.array([1], np.int32), prefix=Segment.empty(), sampling=Sampling(), seed=0
    )
    assert (request.segment_tokens, request.share_key, request.session_key) == (0, -1, -1)


def test_what_took_no_time_took_none() -> None:
    outcome = GenerationOutcome(request_id=1, segment=Segment.empty(), end_reason="stop")
    assert (outcome.paused_s, outcome.queue_s, outcome.generate_s, outcome.routed_experts) == (0.0, 0.0, 0.0, None)
    assert LoadReport(version=1, stage_s=1.0, pause_s=1.0).transfer_s == 0.0


def test_an_engine_joins_no_group_unless_it_says_so() -> None:
    can = EngineCapabilities(num_slots=1, max_context=9, interruptions=("drain",), per_request_seed=True)
    assert can.group_ranks == 0
