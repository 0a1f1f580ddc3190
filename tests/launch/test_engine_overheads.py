"""What the measurement of overheads says of its figures."""

from launch.bench.engine_overheads import guess_line, prefix_line, step_line
from parallel_llama.engine.statistics import StepTimes


def test_a_step_is_split_into_all_its_parts():
    """The report asked for a part that was called something else by then, after all the work."""
    times = StepTimes(10, messages_s=0.1, schedule_s=0.2, forward_s=0.5, sample_s=0.1, decide_s=0.1)
    assert step_line(times, 16) == (
        "a step of 16 requests: 100.0 ms, of which outside the model 50.0%: messages 10.00 ms, "
        "schedule 20.00 ms, forward 50.00 ms, sample 10.00 ms, decide 10.00 ms"
    )


def test_medians_are_taken_over_rounds_and_texts():
    line = prefix_line([(1.0, 0.1), (2.0, 0.4), (4.0, 0.2)])
    assert line.endswith("0.200 s, cold 2.000 s, 0.100x")
    line = guess_line("free", [(1.0, 8, 8), (3.0, 7, 8)])
    assert (
        line == "guesses, free text: 2.00x; each 1.00x (8 of 8 the same), 3.00x (7 of 8 the same)"
    )
