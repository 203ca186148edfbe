"""Handle processes, devices and nodes that stop working: when to suspect them, when to give them up, the causes, and
the consequences.

`resihp.detector.diagnosis` diagnoses the cause of a process's end; the scheduler chooses the next plan. The
chain from a lost rank to a plan in effect:

1. `watchdog.tick` -> `watchdog.fence`: kill ranks without progress. Their exits, like all others, begin step 2.
2. `failures.exited` or `failures.node_lost` -> `failures.replan_after_loss` -> `transition.park`: stop the survivors.
3. `transition.parked` -> `transition.decide_when_parked` -> `next_plan.best`: choose a plan once all have stopped.
4. `transition.propose` -> `consent.confirmed` -> `transition.go_when_confirmed`: build the plan once all ranks agree.
5. `transition.acknowledged` -> `PlanInEffect`: put the plan into effect once all ranks hold their new state.
"""
