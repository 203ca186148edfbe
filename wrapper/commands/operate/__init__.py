"""What operators have a running job do, over its supervisor's authenticated socket: stop, write a checkpoint,
take a fault."""
