"""The interface of a draft (`base`), the table of kinds (`kinds`) and a folder for each kind."""
