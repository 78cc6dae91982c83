"""Two definitions of a function have one key exactly where they are the same program."""

from microbatch._identity import function_key


def scaled_by(scale):
    return lambda x, *, by=scale: by * x


def test_defaults_of_keyword_parameters_are_part_of_the_key():
    assert function_key(scaled_by(2)) == function_key(scaled_by(2))
    assert function_key(scaled_by(2)) != function_key(scaled_by(3))
