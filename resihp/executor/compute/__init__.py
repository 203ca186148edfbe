"""One rank's computation of an iteration: its stage of the model, the execution of its program, the agreed step.

`iteration` describes the work; `interpreter` carries out a program of `resihp.pipeline.program` over the layers of
`stage` and the communicators of `channels`; `step_agreement` ends the iteration. Decides nothing: a plan determines
where everything is computed. Imports torch.
"""
