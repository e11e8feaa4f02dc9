// Messages between the processes of one mesh: torch's send and recv.
#pragma once

namespace tt {

// Ends every receive of this process that is under way; comes back when none is. For the client's last moment.
void EndTransfers();

}  // namespace tt
