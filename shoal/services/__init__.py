"""Services: they answer at once and call nobody."""

STORES = {
    "queue": "shoal.services.queue:Queue",
    "replay": "shoal.services.replay:Replay",
}
