"""Plans for people: the page `report.html` and the text of `secc explain`, both computed from plan.json
alone."""
