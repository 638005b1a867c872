"""`ftctl plan`: what protecting a job costs and what it survives, before it runs."""
