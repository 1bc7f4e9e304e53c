"""Methods that are wrong on purpose (`broken`), each beside the right one (`sound`): does the kit tell them apart?"""
