"""Resuming needs no second copy of the model."""

BUDGET_MIB = 64
MODEL_MIB = 300


def test_a_resume_takes_no_more_than_the_budget(run_program, tmp_path):
    output = run_program("resume_memory.py", tmp_path)

    in_place_mib, with_copy_mib = map(float, output.split())
    assert in_place_mib < 2 * BUDGET_MIB
    assert with_copy_mib > 0.8 * MODEL_MIB, "the measurement must see a copy where one is needed"
