"""One rank's computation of an iteration: its stage of the model, its program, and the agreement on the step.

`iteration` describes the work. `interpreter` executes a program of `resihp.pipeline.program` on the layers of `stage`
and the communicators of `channels`. `step_agreement` ends the iteration. Decides nothing: a plan determines where
everything is computed. Imports torch.
"""
