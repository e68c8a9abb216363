"""Texts in the shapes of what tools print, written for these tests."""

TOPO_M = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPIX\tSYS\tSYS\t0-7,16-23\t0\t\tN/A
GPU1\tPIX\t X \tSYS\tSYS\t0-7,16-23\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tPHB\t8-15,24-31\t1\t\tN/A
NIC0\tSYS\tSYS\tPHB\t X \t\t\t\t

Legend:

  X    = Self
  PIX  = Connection traversing at most a single PCIe bridge
"""

TOPO_M_CUT = """\
        GPU0    GPU1    GPU2    mlx4_0  CPU Affinity
GPU0     X      PIX     SOC     PHB     0-9,20-29
GPU1    PIX      X      SOC     PHB     0-9,20-29
"""

TOPO_P2P = """\
 \tGPU0\tGPU1\tGPU2\t
 GPU0\tX\tOK\tCNS\t
 GPU1\tOK\tX\tCNS\t
 GPU2\tCNS\tCNS\tX\t
"""

LSPCI = """\
00:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Device 153e (prog-if 00 [Normal decode])
\tControl: I/O+ Mem+ BusMaster+
\tNUMA node: 1
\tBus: primary=00, secondary=01, subordinate=04, sec-latency=0
\tCapabilities: [58] Express (v2) Root Port (Slot+), MSI 00
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1
\t\tLnkSta:\tSpeed 32GT/s, Width x16

01:00.0 PCI bridge: Broadcom / LSI Example Switch (rev b0) (prog-if 00 [Normal decode])
\tControl: I/O+ Mem+ BusMaster+
\tBus: primary=01, secondary=02, subordinate=04, sec-latency=0
\tCapabilities: [68] Express (v2) Upstream Port, MSI 00
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1

02:00.0 PCI bridge: Broadcom / LSI Example Switch (rev b0) (prog-if 00 [Normal decode])
\tControl: I/O+ Mem+ BusMaster+
\tBus: primary=02, secondary=03, subordinate=03, sec-latency=0
\tCapabilities: [68] Express (v2) Downstream Port (Slot+), MSI 00
\tCapabilities: [100 v1] Device Serial Number 00-00-00-00-00-00-00-01

02:01.0 PCI bridge: Broadcom / LSI Example Switch (rev b0) (prog-if 00 [Normal decode])
\tControl: I/O+ Mem+ BusMaster+
\tBus: primary=02, secondary=04, subordinate=04, sec-latency=0
\tCapabilities: [68] Express (v2) Downstream Port (Slot+), MSI 00
\tCapabilities: [170 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-

03:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev a1)
\tSubsystem: NVIDIA Corporation Device 204e
\tControl: I/O- Mem+ BusMaster+
\tNUMA node: 1
\tRegion 0: Memory at 7b000000000 (64-bit, prefetchable) [size=64M]
\tRegion 2: Memory at 76000000000 (64-bit, prefetchable) [size=128G]
\tCapabilities: [60] Express (v2) Legacy Endpoint, MSI 00
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1
\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x16
\tCapabilities: [1b8 v2] Advanced Error Reporting
\t\tUESta:\tDLP- SDES- TLP-
\t\tCESta:\tRxErr- BadTLP+ BadDLLP-
\tCapabilities: [250 v1] Single Root I/O Virtualization (SR-IOV)
\t\tRegion 0: Memory at 000007b066000000 (64-bit, prefetchable) [size=1G]
\tKernel driver in use: nvidia

04:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev a1)
\tControl: I/O- Mem+ BusMaster+
\tNUMA node: 1
\tCapabilities: <access denied>
"""

LSPCI_TREE = """\
-+-[0000:80]-+-00.0  Example Host bridge
 |           \\-01.1-[81-82]----00.0-[82]--+-00.0  NVIDIA Corporation GX100 [Example]
 |                                        \\-00.1  NVIDIA Corporation GX100 Audio
 \\-[0000:00]-+-00.0  Example Host bridge
             +-01.1-[01-04]----00.0-[02-04]--+-00.0-[03]----00.0  NVIDIA Corporation GX100
             |                               \\-01.0-[04]----00.0  NVIDIA Corporation GX100
             \\-02.0  Example USB Controller
"""

NCCL_XML = """\
<!-- a comment -->
<system version="1">
  <cpu numaid="0" affinity="00ff00ff" arch="x86_64">
    <pci busid="ffff:ff:01.0" class="0x060400" link_speed="16 GT/s" link_width="16">
      <pci busid="0000:0a:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16"/>
      <pci busid="0000:0b:00.0" class="0x030200" link_speed="" link_width="0"/>
      <pci busid="0000:0c:00.0" class="0x060400">
        <pci busid="0000:0d:00.0" class="0x038000"><gpu dev="2" sm="90"/></pci>
      </pci>
    </pci>
    <pci busid="0000:1a:00.0" class="0x030200"/>
    <nic><net name="eth0" dev="0"/></nic>
  </cpu>
  <cpu numaid="1">
    <pci busid="0000:2a:00.0" class="0x030200"/>
  </cpu>
</system>
"""

NUMACTL = """\
available: 2 nodes (0-1)
node 0 cpus: 0 1 4 5
node 0 size: 100 MB
node 0 free: 50 MB
node 1 cpus: 2 3 6 7
node 1 size: 200 MB
node 1 free: 50 MB
node distances:
node   0   1
  0:  10  32
  1:  32  10
"""

CMDLINE = "BOOT_IMAGE=/vmlinuz-6.1 root=/dev/sda1 ro quiet iommu=pt\n"

ACS_LINES = """\
\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir-
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir-
"""

NVBANDWIDTH = """\
Running device_to_device_memcpy_write_ce.
memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)
          0         1
0      0.00    276.07
1    276.19      0.00

Running host_to_device_bidirectional_memcpy_ce.
memcpy CE CPU(row) <-> GPU(column) bandwidth (GB/s)
          0         1
0     18.56     18.37
"""

P2P_TEST = """\
[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]
Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)
   D\\D     0      1
     0 911.08  20.10
     1  20.39 920.20
Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
   D\\D     0      1
     0 912.68   9.90
     1   9.90 922.37
P2P=Enabled Latency (P2P Writes) Matrix (us)
   GPU     0      1
     0   1.29   0.47
     1   0.53   1.32
"""

UNTITLED = """\
 Dst→   GPU0   GPU1
GPU0:    —     53.9
GPU1:  53.8     —
"""
