"""One rank's computation of an iteration: its stage of the model, its program carried out, the step agreed on.

`iteration` is what there is to do; `interpreter` carries out what `resihp.pipeline.program` says, over the layers of
`stage` and the communicators of `channels`; `step_agreement` ends the iteration. Decides nothing: a plan says what is
computed where. Imports torch.
"""
