from qrl.cli import main

main()
