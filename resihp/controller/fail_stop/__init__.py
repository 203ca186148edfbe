"""Handle processes, devices and nodes that stop working: when to suspect them, when to give them up, the causes, and
the consequences.

`resihp.detector.diagnosis` diagnoses the cause of a process's end; the scheduler chooses the next plan.
"""
