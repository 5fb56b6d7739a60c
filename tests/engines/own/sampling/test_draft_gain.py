"""A draft model's gain: drafts go on where they pay, and lose little elsewhere."""

import pytest

from tokenmill_worker.engines.own.sampling.draft_gain import ALLOWANCE_S, DraftGain

PLAIN_S = 0.02
ROW_S = 0.001


def simulate(draft_s: float, acceptance: float, num_steps: int = 20_000) -> tuple[float, float]:
    """Run steps of four sequences with drafts of four tokens; return the share of the steps with
    drafts, and the seconds that all steps took beyond those that plain ones would have taken.
    """
    now, seconds, tokens, num_drafted = 0.0, 0.0, 0.0, 0
    gain = DraftGain(clock=lambda: now)
    for _ in range(num_steps):
        began = now
        drafts = 16 if gain.begin(4) else 0
        if drafts:
            num_drafted += 1
            now += draft_s
            gain.drafted()
        now += PLAIN_S + drafts * ROW_S
        accepted = round(drafts * acceptance)
        gain.end(drafts, 0, accepted, is_decode=True)
        seconds += now - began
        tokens += 4 + accepted
    return num_drafted / num_steps, seconds - PLAIN_S * tokens / 4


@pytest.mark.parametrize(("draft_s", "acceptance"), [(0.01, 0.0), (0.08, 1.0), (0.004, 0.2)])
def test_drafts_without_gain_cost_at_most_one_percent(draft_s: float, acceptance: float) -> None:
    share, lost_s = simulate(draft_s, acceptance)
    assert 0 < share < 0.1
    assert lost_s <= 2 * ALLOWANCE_S + 0.011 * 20_000 * PLAIN_S


def test_drafts_with_gain_continue() -> None:
    share, lost_s = simulate(0.01, 0.8)
    assert share > 0.95
    assert lost_s < 0


def test_a_size_that_was_not_measured_runs_without_drafts_once() -> None:
    gain = DraftGain(clock=lambda: 0.0)
    for count in (1, 2):
        assert not gain.begin(count)
        gain.end(0, 0, 0, is_decode=True)
        assert gain.begin(count)
        gain.end(0, 0, 0, is_decode=True)
