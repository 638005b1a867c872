"""What `events.jsonl` tells of a job, for whoever looks at it: nothing here is needed to run one."""
