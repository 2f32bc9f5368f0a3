"""Services: they answer at once and call nobody."""

STORES = {"queue": "shoal.services.queue:Queue"}
