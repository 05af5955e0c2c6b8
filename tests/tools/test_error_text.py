"""Errors of Keras and TensorFlow in one line that says what is wrong: what each of their lines makes of one error."""

import pytest

from accum._cli.error_text import one_line

KERAS_3 = """Exception encountered when calling Bad.call().

\x1b[1mthe layer's own words.\x1b[0m

Arguments received by Bad.call():
  • x=tf.Tensor(shape=(None, 3), dtype=float32)"""
KERAS_3_SHAPES = """Exception encountered when calling Bad.call().

\x1b[1mCould not infer the output shape of 'bad'. Error encountered:

the layer's own words\x1b[0m"""
TRACED = """in user code:

    File "a/training.py", line 1401, in train_function  *
        return step_function(self, iterator)
    File "/tmp/__autograph_generated_file.py", line 8, in tf__call
        raise ag__.converted_call(ag__.ld(ValueError), ("no",), None, fscope)

    ValueError: Exception encountered when calling layer 'bad' (type Bad).
    \n    in user code:
    \n        File "/tmp/vb.py", line 5, in call  *
            def call(self,x): raise ValueError("no")
    \n        ValueError: the layer's own words
    \n    Call arguments received by layer 'bad' (type Bad):
      • x=tf.Tensor(shape=(None, 3), dtype=float32)
"""
TRACED_IN_2_2 = """in user code:

    a/training.py:571 train_function  *
        outputs = self.distribute_strategy.run(
    b.py:5 call  *
        ' but received input with shape ' + str(shape))

    ValueError: the layer's own words
"""
RUN = """Graph execution error:

Detected at node assert_less defined at (most recent call last):
  File "b.py", line 4, in <module>

  File "a/trainer.py", line 399, in fit

the layer's own words
\t [[{{node assert_less}}]] [Op:__inference_train_function_468]"""

SEVERAL = """ 2 root error(s) found.
  (0) INVALID_ARGUMENT:  the layer's own words
\t [[{{node assert_less}}]]
\t [[assert_less/_2]]
  (1) INVALID_ARGUMENT:  the layer's own words
\t [[{{node assert_less}}]]
0 successful operations.
0 derived errors ignored. [Op:__inference_train_function_468]"""
RUN_OF_SEVERAL = RUN.partition("the layer's")[0] + SEVERAL.lstrip()


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "text,said",
    [
        ("", "no message"),
        (" \n ", "no message"),
        ("the layer's own words.\nand more", "the layer's own words"),
        (KERAS_3, "the layer's own words"),
        (KERAS_3_SHAPES, "Could not infer the output shape of 'bad'. Error encountered: the layer's own words"),
        (TRACED, "the layer's own words"),
        (TRACED_IN_2_2, "the layer's own words"),
        (RUN, "the layer's own words"),
        (SEVERAL, "INVALID_ARGUMENT:  the layer's own words"),
        (RUN_OF_SEVERAL, "INVALID_ARGUMENT:  the layer's own words"),
        ("in user code:\n\n", "in user code"),
    ],
    ids=[
        "nothing",
        "blank",
        "plain",
        "keras-3",
        "keras-3-shapes",
        "traced",
        "traced-in-2.2",
        "run",
        "several",
        "run-of-several",
        "only-where",
    ],
)
def test_an_error_is_told_by_the_line_that_says_what_is_wrong(text, said):
    assert one_line(ValueError(text)) == "ValueError: " + said
