"""What can be said about schedules without running them: what each sample owes, and how short no step can
be."""
