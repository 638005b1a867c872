"""Rules of replica groups: who takes part in a step, who trains which samples, and the ledger of it."""
