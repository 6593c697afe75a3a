# SPDX-License-Identifier: Apache-2.0
"""Where QuantFuse is plugged into other packages; each module imports the one it is named after."""
