"""What people see of a run, made from StepRecords alone."""
