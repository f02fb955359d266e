"""What an optimizer may be divided into, proved by following the data through its steps.

Read in this order:

1. `judging` decides: an optimizer is `known`, or proved, and the result is a `judgement`.
2. `proving` is the proof. A `small_copy` of the optimizer makes a few steps; they are followed,
   replayed from a tape on other values, and tried divided.
3. `following` is how data is followed: each operation has one of the `rules`, and memory has marks
   that say which parameter's data it has. `interception` sees the operations, and has the tape.
4. `watching` checks the real steps by the same rules, for as long as training lasts.
"""
