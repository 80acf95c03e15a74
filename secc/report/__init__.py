"""Plans for people: the page `report.html` and the text of `secc explain`, both from plan.json alone."""
